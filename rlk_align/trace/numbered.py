"""The rows of a pass by row number of the batch."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from rlk_align.model.sites import RowIndex, Site
from rlk_align.trace.reader import PassReader, SiteRows
from rlk_align.trace.schema import copies_of


@dataclass(frozen=True, slots=True)
class NumberedRows:
    """A site's rows in one pass: each (sample, position) once, in the order of the batch."""

    rows: SiteRows
    number: np.ndarray
    """The row numbers in the batch, ascending, `[N]`."""
    at: np.ndarray
    """The index of each in `rows`, `[N]`."""
    conflicts: int
    """The number of rows that occur twice with different bits."""
    strays: int
    """The number of rows outside the batch."""
    copies: dict[int, "NumberedRows"] = field(default_factory=dict)
    """Rank -> the rows of which that rank has a different copy."""
    cached: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """The row numbers that the pass took from its cache, ascending. They are in `number` too, with
    the row of the sample that computed them, if it is known."""

    def find(self, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(which of these row numbers exist here, bool `[N]`; the index of each in `rows`)."""
        here, where = np.isin(number, self.number), np.searchsorted(self.number, number)
        return here, self.at[where[here]]


def number_rows(rows: SiteRows, index: RowIndex) -> NumberedRows:
    """Numbers the rows of a site. Of a row that occurs twice, after preemption or recomputation,
    the first is used, and different bits count as a conflict."""
    number = index.rows(rows.sample, rows.position)
    if len(number) and number[0] >= 0 and (number[1:] > number[:-1]).all():
        # Most passes write each row once, in order.
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


def with_cached(
    numbered: NumberedRows, tokens: Mapping[int, int], index: RowIndex, ahead: bool = False
) -> NumberedRows:
    """Adds the rows that a pass took from its cache. `tokens`: sample -> the number of its first
    tokens that the engine took from there.

    Such a row is that of another sample with the same tokens so far, or also with the same next
    one where the row speaks of it (`ahead`). If several samples computed
    it with different bits, it is unknown which of them was cached. Logits of a prompt's last token
    are never cached.
    """
    lacks, of_cache = np.ones(len(index), dtype=bool), np.zeros(len(index), dtype=bool)
    lacks[numbered.number] = False
    for sample, count in tokens.items():
        most = len(index.batch.samples[sample].prompt_ids) - 1
        start = index.offsets[sample]
        of_cache[start : start + min(count, most)] = True
    cached = np.flatnonzero(of_cache & lacks)
    # The last token of a sample has no next one, and no row that speaks of it.
    of_row = np.roll(index.prefixes, -1) if ahead else index.prefixes
    prefixes, first, group = np.unique(
        of_row[numbered.number], return_index=True, return_inverse=True
    )
    digest = numbered.rows.digest[numbered.at]
    equal = (digest == digest[first[group]]).all(axis=1)
    ambiguous = prefixes[np.unique(group[~equal])]
    wanted = of_row[cached]
    known = np.isin(wanted, prefixes) & ~np.isin(wanted, ambiguous)
    at = numbered.at[first[np.searchsorted(prefixes, wanted[known])]]
    number = np.concatenate([numbered.number, cached[known]])
    order = np.argsort(number)
    at = np.concatenate([numbered.at, at])[order]
    return replace(numbered, number=number[order], at=at, cached=cached)


def read_rows(reader: PassReader, site: str, index: RowIndex) -> NumberedRows | None:
    """A site's rows in a pass; None if the pass has none."""
    rows = reader.rows(site)
    if rows is None:
        return None
    numbered = number_rows(rows, index)
    for rank, name in copies_of(site, reader.record.sites).items():
        copy = reader.rows(name)
        if copy is not None:
            numbered.copies[rank] = number_rows(copy, index)
    cached = reader.record.cached
    return with_cached(numbered, cached, index, site == "logprob") if cached else numbered


def read_ahead(
    passes: Sequence[PassReader], sites: Sequence[Site], index: RowIndex
) -> Iterator[list[NumberedRows | None]]:
    """`read_rows` of all passes, site by site: one thread for each pass reads the next site while
    the caller works on the current one."""
    with ThreadPoolExecutor(max(1, len(passes))) as pool:

        def start(site: Site) -> list[Future[NumberedRows | None]]:
            return [pool.submit(read_rows, reader, site.name, index) for reader in passes]

        pending = [start(site) for site in sites[:1]]
        for following in range(1, len(sites) + 1):
            rows = [future.result() for future in pending.pop()]
            # Only now, so that two threads never read one file.
            pending += [start(site) for site in sites[following : following + 1]]
            yield rows


def blocks(rows: np.ndarray, features: int, elements: int) -> Iterator[np.ndarray]:
    """Splits row numbers into blocks of about this many elements, and of at least one row."""
    step = max(1, elements // features)
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def rows_that_differ(a: NumberedRows, b: NumberedRows) -> np.ndarray:
    """The row numbers that both have, with different bits, ascending."""
    if np.array_equal(a.number, b.number):
        number, i, j = a.number, a.at, b.at
    else:
        number, first, second = np.intersect1d(
            a.number, b.number, assume_unique=True, return_indices=True
        )
        i, j = a.at[first], b.at[second]
    return number[(a.rows.digest[i] != b.rows.digest[j]).any(axis=1)]
