"""What a pass recorded, by row of the batch, for code that computes on recorded values."""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch

from rlk_align.model.sites import RowIndex
from rlk_align.trace.numbered import read_rows
from rlk_align.trace.reader import PassReader

HELD_BYTES = 1 << 30
"""Bytes of rows' places and digests that are held at a time. Sites that were read longest ago are
dropped, and read again when they are asked for; an engine that decodes asks for each site at every
step."""


@dataclass(frozen=True, slots=True)
class _BatchRows:
    """What a pass holds of one site: arrays by row number of the batch. Of a row that it saw twice,
    the first."""

    present: np.ndarray
    finite: np.ndarray
    """Whether the row has a value, all of whose entries are finite."""
    digest: np.ndarray
    shard: np.ndarray
    """-1 where no value is kept."""
    index: np.ndarray

    @property
    def nbytes(self) -> int:
        columns = (self.present, self.finite, self.digest, self.shard, self.index)
        return sum(c.nbytes for c in columns)


class RecordedRows:
    """One pass, by row number of the batch; values stay on disk."""

    def __init__(self, reader: PassReader, index: RowIndex) -> None:
        self.reader = reader
        self.index = index
        self._rows: OrderedDict[str, _BatchRows] = OrderedDict()

    def present(self, site: str) -> np.ndarray:
        """Which rows of the batch the pass has, a mask."""
        return self._of(site).present

    def digests(self, site: str) -> np.ndarray:
        """int64 `[rows of the batch, 2]`; 0 where a row has no value."""
        return self._of(site).digest

    def has_value(self, site: str) -> np.ndarray:
        """Which rows of the batch have a value, a mask."""
        return self._of(site).shard >= 0

    def finite(self, site: str) -> np.ndarray:
        """Which rows of the batch have a value without NaN and Inf, a mask."""
        return self._of(site).finite

    def find(
        self, site: str, sample: np.ndarray, position: np.ndarray
    ) -> tuple[torch.Tensor | None, np.ndarray]:
        """The values `[n, F]` of the rows at (sample, position) that have one, None where none
        has, and which ones these are, bool `[N]`."""
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
            while len(self._rows) > 1 and sum(r.nbytes for r in self._rows.values()) > HELD_BYTES:
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
            columns.finite[number] = (rows.shard[at] >= 0) & (rows.nonfinite[at] == 0)
            columns.digest[number] = rows.digest[at]
            columns.shard[number], columns.index[number] = rows.shard[at], rows.index[at]
        return columns
