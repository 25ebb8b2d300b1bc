"""Rows of a pass by row number of the batch."""

from dataclasses import dataclass

import numpy as np

from rlk_align.model.sites import RowIndex
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


def read_rows(reader: PassReader, site: str, index: RowIndex) -> NumberedRows | None:
    """A site's rows in a pass, or None where the pass has none."""
    rows = reader.rows(site)
    return None if rows is None else number_rows(rows, index)
