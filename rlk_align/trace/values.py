"""The recorded values of a pass by row of the batch, for code that computes with them."""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch

from rlk_align.model.sites import RowIndex
from rlk_align.trace.numbered import read_rows
from rlk_align.trace.reader import PassReader

CACHE_BYTES = 1 << 30
"""The size of the cache of rows' locations and digests. The sites that were used longest ago are
dropped, and read again when they are needed: a decoding engine uses each site at every step."""


@dataclass(frozen=True, slots=True)
class _BatchRows:
    """The rows of one site in a pass: arrays by row number of the batch. Of a row that occurs
    twice, they have the first."""

    present: np.ndarray
    finite: np.ndarray
    """Whether the row has a value and all its entries are finite."""
    digest: np.ndarray
    shard: np.ndarray
    """-1 for a row without a value."""
    index: np.ndarray

    @property
    def nbytes(self) -> int:
        columns = (self.present, self.finite, self.digest, self.shard, self.index)
        return sum(c.nbytes for c in columns)


class RecordedRows:
    """The rows of one pass by row number of the batch; values stay on disk."""

    def __init__(self, reader: PassReader, index: RowIndex) -> None:
        self.reader = reader
        self.index = index
        self._rows: OrderedDict[str, _BatchRows] = OrderedDict()

    def present(self, site: str) -> np.ndarray:
        """A mask of the rows of the batch that the pass computed. Rows that it took from its cache
        have digests and values alone."""
        return self._of(site).present

    def digests(self, site: str) -> np.ndarray:
        """int64 `[rows of the batch, 2]`; 0 for a row that the pass lacks."""
        return self._of(site).digest

    def has_value(self, site: str) -> np.ndarray:
        """A mask of the rows of the batch with a value."""
        return self._of(site).shard >= 0

    def finite(self, site: str) -> np.ndarray:
        """A mask of the rows of the batch with a value without NaN and Inf."""
        return self._of(site).finite

    def find(
        self, site: str, sample: np.ndarray, position: np.ndarray
    ) -> tuple[torch.Tensor | None, np.ndarray]:
        """The values `[n, F]` of the rows at (sample, position) that have one, or None if none has,
        and a mask of these rows, bool `[N]`."""
        number = self.index.rows(sample, position)
        valued = np.where(number >= 0, self.has_value(site)[number], False)
        return (self.values(site, number[valued]) if valued.any() else None), valued

    def values(self, site: str, number: np.ndarray) -> torch.Tensor:
        """Values `[n, F]` of rows that have one, in the engine's dtype."""
        rows = self._of(site)
        return self.reader.values_at(site, rows.shard[number], rows.index[number])

    def _of(self, site: str) -> _BatchRows:
        if site not in self._rows:
            self._rows[site] = self._read(site)
            while len(self._rows) > 1 and sum(r.nbytes for r in self._rows.values()) > CACHE_BYTES:
                self._rows.popitem(last=False)
        self._rows.move_to_end(site)
        return self._rows[site]

    def _read(self, site: str) -> _BatchRows:
        size = len(self.index)
        columns = _BatchRows(
            present=np.zeros(size, dtype=bool),
            finite=np.zeros(size, dtype=bool),
            digest=np.zeros((size, 2), dtype=np.int64),
            shard=np.full(size, -1, dtype=np.int32),
            index=np.full(size, -1, dtype=np.int64),
        )
        numbered = read_rows(self.reader, site, self.index)
        if numbered is not None:
            number, rows, at = numbered.number, numbered.rows, numbered.at
            columns.present[number] = True
            columns.present[numbered.cached] = False
            columns.finite[number] = (rows.shard[at] >= 0) & (rows.nonfinite[at] == 0)
            columns.digest[number] = rows.digest[at]
            columns.shard[number], columns.index[number] = rows.shard[at], rows.index[at]
        return columns
