"""Two passes -> pairs of rows, by canonical site, sample and position; what is left over is
reported, never skipped."""

from dataclasses import dataclass

import numpy as np

from rlk_align.model.sites import Site
from rlk_align.trace.numbered import NumberedRows
from rlk_align.trace.reader import SiteRows


@dataclass(frozen=True, slots=True)
class Unpaired:
    """Rows that were expected of a site and are not there on both sides."""

    site: str
    rows: int
    reason: str
    explained: bool
    """Whether the engine says that it cannot show this site."""


Copies = dict[int, NumberedRows]


@dataclass(frozen=True, slots=True)
class PairedSite:
    """The rows that both passes hold of one site; arrays of length N, in batch order."""

    site: Site
    number: np.ndarray
    a: SiteRows
    a_at: np.ndarray
    b: SiteRows
    b_at: np.ndarray
    copies: tuple[Copies, Copies]
    """For both passes: rank -> the rows for which that rank holds another copy."""

    @property
    def equal(self) -> np.ndarray:
        """Whether the raw bits agree, bool `[N]`, those of all ranks."""
        return self.recorded_equal & ~self.disagree

    @property
    def recorded_equal(self) -> np.ndarray:
        """Whether those agree that each pass keeps under the site's own name, bool `[N]`."""
        return (self.a.digest[self.a_at] == self.b.digest[self.b_at]).all(axis=1)

    @property
    def disagree(self) -> np.ndarray:
        """Rows of which ranks of one pass hold copies with different bits, bool `[N]`, unless those
        of the other pass hold the same ones, rank by rank."""
        first, second = (self._unequal(of_pass) for of_pass in self.copies)
        mask = first ^ second
        for rank in self.copies[0].keys() | self.copies[1].keys():
            mask |= first & (self.digest_of(0, rank) != self.digest_of(1, rank)).any(axis=1)
        return mask

    def _unequal(self, of_pass: Copies) -> np.ndarray:
        rows = [np.isin(self.number, copy.number) for copy in of_pass.values()]
        return np.logical_or.reduce([np.zeros(len(self.number), dtype=bool), *rows])

    def digest_of(self, which: int, rank: int) -> np.ndarray:
        """`[N, 2]`: what that rank of the first pass (0) or the second has."""
        digest = (self.a.digest[self.a_at], self.b.digest[self.b_at])[which]
        if copy := self.copies[which].get(rank):
            here, at = copy.find(self.number)
            digest[here] = copy.rows.digest[at]
        return digest

    @property
    def nonfinite(self) -> np.ndarray:
        """NaN or Inf entries of both sides together, `[N]`."""
        return self.a.nonfinite[self.a_at] + self.b.nonfinite[self.b_at]


def pair_site(
    site: Site,
    a: NumberedRows | None,
    b: NumberedRows | None,
    expected: np.ndarray,
    names: tuple[str, str],
    reasons: tuple[str | None, str | None],
) -> tuple[PairedSite | None, list[Unpaired]]:
    """Pairs one site's rows; `expected` is the mask over the batch of the rows that must be there.

    `names` are how the sides are called in reasons, `reasons` what each engine says of a
    site that it cannot show.
    """
    wanted = int(expected.sum())
    unpaired: list[Unpaired] = []
    for side, name, reason in zip((a, b), names, reasons, strict=True):
        if reason is None:
            unpaired += _missing(site, side, expected, name)
        else:
            why = f"{name} cannot show it: {reason}"
            unpaired.append(Unpaired(site.name, wanted, why, True))
    # What an engine cannot show in all of a pass it may have shown in some of it.
    if a is None or b is None or reasons != (None, None):
        return None, unpaired
    number, a_in, b_in = np.intersect1d(a.number, b.number, assume_unique=True, return_indices=True)
    wanted_here = expected[number]
    paired = PairedSite(
        site,
        number[wanted_here],
        a.rows,
        a.at[a_in[wanted_here]],
        b.rows,
        b.at[b_in[wanted_here]],
        (a.copies, b.copies),
    )
    return paired, unpaired


def _missing(
    site: Site, side: NumberedRows | None, expected: np.ndarray, name: str
) -> list[Unpaired]:
    present = np.zeros(len(expected), dtype=bool)
    out = []
    if side is not None:
        present[side.number] = True
        if side.conflicts:
            reason = f"{name} computed rows twice with different bits"
            out.append(Unpaired(site.name, side.conflicts, reason, False))
        if side.strays:
            reason = f"{name} has rows that the batch lacks"
            out.append(Unpaired(site.name, side.strays, reason, False))
    absent = int((expected & ~present).sum())
    if absent:
        share = "every row" if absent == int(expected.sum()) else f"{absent} rows"
        out.append(Unpaired(site.name, absent, f"{name} lacks {share}", False))
    return out
