"""Two passes -> pairs of rows, by canonical site, sample and position; what is left over is
reported, never skipped."""

from dataclasses import dataclass

import numpy as np

from rlk_align.model.sites import RowIndex, Site
from rlk_align.trace.reader import PassReader, SiteRows


@dataclass(frozen=True, slots=True)
class NumberedRows:
    """A site's rows in one pass, each (sample, position) once, in the order of the batch."""

    rows: SiteRows
    number: np.ndarray
    """Row numbers in the batch, ascending, `[N]`."""
    at: np.ndarray
    """Where each of them lies in `rows`, `[N]`."""
    conflicts: int
    """Rows seen twice with different bits."""
    strays: int
    """Rows that the batch does not have."""


def number_rows(rows: SiteRows, index: RowIndex) -> NumberedRows:
    """A row seen twice (preemption, recomputation) must match itself; the first is kept."""
    number = index.rows(rows.sample, rows.position)
    known = np.flatnonzero(number >= 0)
    order = known[np.argsort(number[known], kind="stable")]
    ordered = number[order]
    repeated = np.zeros(len(ordered), dtype=bool)
    repeated[1:] = ordered[1:] == ordered[:-1]
    first = order[~repeated]
    digest_of = np.zeros((len(index), 2), dtype=np.int64)
    digest_of[number[first]] = rows.digest[first]
    again = order[repeated]
    conflicts = (rows.digest[again] != digest_of[number[again]]).any(axis=1)
    return NumberedRows(rows, number[first], first, int(conflicts.sum()), int((number < 0).sum()))


@dataclass(frozen=True, slots=True)
class Unpaired:
    """Rows that were expected of a site and are not there on both sides."""

    site: str
    rows: int
    reason: str
    explained: bool
    """Whether the engine says that it cannot show this site."""


@dataclass(frozen=True, slots=True)
class PairedSite:
    """The rows that both passes hold of one site; arrays of length N, in batch order."""

    site: Site
    number: np.ndarray
    a: SiteRows
    a_at: np.ndarray
    b: SiteRows
    b_at: np.ndarray

    @property
    def equal(self) -> np.ndarray:
        """Whether the raw bits agree, bool `[N]`."""
        return (self.a.digest[self.a_at] == self.b.digest[self.b_at]).all(axis=1)

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
    if a is None or b is None:
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
    )
    return paired, unpaired


def _missing(
    site: Site, side: NumberedRows | None, expected: np.ndarray, name: str
) -> list[Unpaired]:
    found = np.zeros(len(expected), dtype=bool)
    out = []
    if side is not None:
        found[side.number] = True
        if side.conflicts:
            reason = f"{name} computed rows twice with different bits"
            out.append(Unpaired(site.name, side.conflicts, reason, False))
        if side.strays:
            reason = f"{name} has rows that the batch has not"
            out.append(Unpaired(site.name, side.strays, reason, False))
    absent = int((expected & ~found).sum())
    if absent:
        share = "every row" if absent == int(expected.sum()) else f"{absent} rows"
        out.append(Unpaired(site.name, absent, f"{name} lacks {share}", False))
    return out


def read_rows(reader: PassReader, site: str, index: RowIndex) -> NumberedRows | None:
    """A site's rows in a pass, or None where the pass has none."""
    rows = reader.rows(site)
    return None if rows is None else number_rows(rows, index)
