"""Pairs the rows of two passes by canonical site, sample and position; rows without a partner are
reported, never skipped."""

from dataclasses import dataclass

import numpy as np

from rlk_align.model.sites import Site
from rlk_align.trace.numbered import NumberedRows
from rlk_align.trace.reader import SiteRows


@dataclass(frozen=True, slots=True)
class Unpaired:
    """Expected rows of a site that one side or both sides lack."""

    site: str
    rows: int
    reason: str
    explained: bool
    """Whether the engine states that it cannot show this site."""


Copies = dict[int, NumberedRows]


@dataclass(frozen=True, slots=True)
class PairedSite:
    """The rows of one site that both passes have; arrays of length N, in batch order."""

    site: Site
    number: np.ndarray
    a: SiteRows
    a_at: np.ndarray
    b: SiteRows
    b_at: np.ndarray
    copies: tuple[Copies, Copies]
    """For both passes: rank -> the rows of which that rank has a different copy."""

    @property
    def equal(self) -> np.ndarray:
        """Whether the raw bits of all ranks agree, bool `[N]`."""
        return self.recorded_equal & ~self.disagree

    @property
    def recorded_equal(self) -> np.ndarray:
        """Whether the bits agree that each pass keeps under the site's own name, bool `[N]`."""
        return (self.a.digest[self.a_at] == self.b.digest[self.b_at]).all(axis=1)

    @property
    def disagree(self) -> np.ndarray:
        """Rows whose copies on the ranks of one pass have different bits, bool `[N]`, unless the
        ranks of the other pass have the same copies, rank by rank."""
        first, second = (self._unequal(of_pass) for of_pass in self.copies)
        mask = first ^ second
        for rank in self.copies[0].keys() | self.copies[1].keys():
            mask |= first & (self.digest_of(0, rank) != self.digest_of(1, rank)).any(axis=1)
        return mask

    def _unequal(self, of_pass: Copies) -> np.ndarray:
        rows = [np.isin(self.number, copy.number) for copy in of_pass.values()]
        return np.logical_or.reduce([np.zeros(len(self.number), dtype=bool), *rows])

    def digest_of(self, which: int, rank: int) -> np.ndarray:
        """The digests of a rank of the first pass (0) or the second, `[N, 2]`."""
        digest = (self.a.digest[self.a_at], self.b.digest[self.b_at])[which]
        if copy := self.copies[which].get(rank):
            here, at = copy.find(self.number)
            digest[here] = copy.rows.digest[at]
        return digest

    @property
    def valued(self) -> np.ndarray:
        """Rows whose values both sides keep, bool `[N]`."""
        return (self.a.shard[self.a_at] >= 0) & (self.b.shard[self.b_at] >= 0)

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
    """Pairs one site's rows; `expected` is a mask over the batch of the rows that must exist.

    `names`: the names of the sides in reasons. `reasons`: why each engine cannot show the site;
    None where it can.
    """
    wanted = int(expected.sum())
    unpaired: list[Unpaired] = []
    for side, name, reason in zip((a, b), names, reasons, strict=True):
        if reason is None:
            unpaired += _missing(site, side, expected, name)
        else:
            why = f"{name} cannot show it: {reason}"
            unpaired.append(Unpaired(site.name, wanted, why, True))
    # An engine may have shown a site in a part of the pass only.
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
