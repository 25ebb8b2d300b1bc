"""The recorded values of a pass by (sample, position), for whoever puts them back."""

from dataclasses import dataclass

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from rlk_align.errors import CorruptTrace
from rlk_align.model.sites import RowIndex
from rlk_align.trace.reader import PassReader


@dataclass(frozen=True, slots=True)
class _Slots:
    """Where the rows of one site lie: arrays by row number of the batch."""

    shard: np.ndarray
    """-1 where no value is kept."""
    index: np.ndarray


class RecordedRows:
    """Values of one pass. What is read stays mapped from its file, not copied."""

    def __init__(self, reader: PassReader, index: RowIndex) -> None:
        self._reader, self._index = reader, index
        self._slots: dict[str, _Slots] = {}
        self._tensors: dict[tuple[str, int], torch.Tensor] = {}

    def kept(self, site: str) -> np.ndarray:
        """Which rows of the batch have a value, a mask."""
        return self._of(site).shard >= 0

    def find(
        self, site: str, sample: np.ndarray, position: np.ndarray
    ) -> tuple[torch.Tensor | None, np.ndarray]:
        """The values `[n, F]` of the rows at (sample, position) that have one, None where none
        has, and which ones these are, bool `[N]`."""
        slots, number = self._of(site), self._index.rows(sample, position)
        shard = np.where(number >= 0, slots.shard[number], -1)
        found = shard >= 0
        if not found.any():
            return None, found
        record = self._reader.record.sites[site]
        out = torch.empty(int(found.sum()), record.features, dtype=getattr(torch, record.dtype))
        shard, index = shard[found], slots.index[number[found]]
        for s in np.unique(shard):
            here = torch.from_numpy(np.flatnonzero(shard == s))
            out[here] = self._tensor(site, int(s))[torch.from_numpy(index[shard == s])]
        return out, found

    def _of(self, site: str) -> _Slots:
        if site not in self._slots:
            shard, index = (np.full(len(self._index), -1, dtype=np.int64) for _ in range(2))
            rows = self._reader.rows(site)
            if rows is not None:
                number = self._index.rows(rows.sample, rows.position)
                # Backwards, so that of a row that was seen twice the first one stays.
                kept = np.flatnonzero((number >= 0) & (rows.shard >= 0))[::-1]
                shard[number[kept]], index[number[kept]] = rows.shard[kept], rows.index[kept]
            self._slots[site] = _Slots(shard, index)
        return self._slots[site]

    def _tensor(self, site: str, shard: int) -> torch.Tensor:
        if (site, shard) not in self._tensors:
            path = self._reader.values_file(shard)
            try:
                with safe_open(path, framework="pt") as file:
                    self._tensors[site, shard] = file.get_tensor(site)
            except (OSError, SafetensorError) as error:
                raise CorruptTrace(f"{path}: {site}: {error}") from error
        return self._tensors[site, shard]
