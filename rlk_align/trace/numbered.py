"""Rows of a pass by row number of the batch."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from rlk_align.model.sites import RowIndex, Site
from rlk_align.trace.reader import PassReader, SiteRows
from rlk_align.trace.schema import copies_of


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
    copies: dict[int, "NumberedRows"] = field(default_factory=dict)
    """Rank -> the rows of which that rank holds another copy than these."""

    def find(self, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(which of these row numbers are here, bool `[N]`; where each of those lies in `rows`)."""
        here, where = np.isin(number, self.number), np.searchsorted(self.number, number)
        return here, self.at[where[here]]


def number_rows(rows: SiteRows, index: RowIndex) -> NumberedRows:
    """A row seen twice (preemption, recomputation) must match itself; the first is kept."""
    number = index.rows(rows.sample, rows.position)
    if len(number) and number[0] >= 0 and (number[1:] > number[:-1]).all():
        # In order and once each, as most passes write them.
        return NumberedRows(rows, number, np.arange(len(number)), conflicts=0, strays=0)
    known = np.flatnonzero(number >= 0)
    order = known[np.argsort(number[known], kind="stable")]
    ordered = number[order]
    repeated = np.zeros(len(ordered), dtype=bool)
    repeated[1:] = ordered[1:] == ordered[:-1]
    first = order[~repeated]
    digest_of = np.zeros((len(index), 2), dtype=np.int64)
    digest_of[number[first]] = rows.digest[first]
    repeats = order[repeated]
    conflicts = (rows.digest[repeats] != digest_of[number[repeats]]).any(axis=1)
    return NumberedRows(rows, number[first], first, int(conflicts.sum()), int((number < 0).sum()))


def read_rows(reader: PassReader, site: str, index: RowIndex) -> NumberedRows | None:
    """A site's rows in a pass, or None where the pass has none."""
    rows = reader.rows(site)
    if rows is None:
        return None
    numbered = number_rows(rows, index)
    for rank, name in copies_of(site, reader.record.sites).items():
        copy = reader.rows(name)
        if copy is not None:
            numbered.copies[rank] = number_rows(copy, index)
    return numbered


def read_ahead(
    passes: Sequence[PassReader], sites: Sequence[Site], index: RowIndex
) -> Iterator[list[NumberedRows | None]]:
    """`read_rows` of all passes, site by site: each pass is read by a thread of its own, while the
    site before is worked on."""
    with ThreadPoolExecutor(max(1, len(passes))) as pool:

        def ask(site: Site) -> list[Future[NumberedRows | None]]:
            return [pool.submit(read_rows, reader, site.name, index) for reader in passes]

        coming = [ask(site) for site in sites[:1]]
        for following in range(1, len(sites) + 1):
            rows = [future.result() for future in coming.pop()]
            # Not before: one file is not read by two threads.
            coming += [ask(site) for site in sites[following : following + 1]]
            yield rows


def blocks(rows: np.ndarray, features: int, elements: int) -> Iterator[np.ndarray]:
    """Splits row numbers into blocks of about this many elements, of one row at least."""
    step = max(1, elements // features)
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def rows_that_differ(a: NumberedRows, b: NumberedRows) -> np.ndarray:
    """Row numbers that both have, with other bits, ascending."""
    if np.array_equal(a.number, b.number):
        number, i, j = a.number, a.at, b.at
    else:
        number, first, second = np.intersect1d(
            a.number, b.number, assume_unique=True, return_indices=True
        )
        i, j = a.at[first], b.at[second]
    return number[(a.rows.digest[i] != b.rows.digest[j]).any(axis=1)]
