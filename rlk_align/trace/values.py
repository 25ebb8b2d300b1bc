"""The recorded values of a pass by row, for whoever puts them back or compares them."""

from dataclasses import dataclass

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from rlk_align.errors import CorruptTrace
from rlk_align.model.sites import RowIndex
from rlk_align.trace.reader import PassReader


@dataclass(frozen=True, slots=True)
class _Slots:
    """What a pass holds of one site: arrays by row number of the batch. Of a row that it saw twice,
    the first."""

    present: np.ndarray
    digest: np.ndarray
    shard: np.ndarray
    """-1 where no value is kept."""
    index: np.ndarray


class RecordedRows:
    """One pass, by row number of the batch. Values that are read stay mapped from their file."""

    def __init__(self, reader: PassReader, index: RowIndex) -> None:
        self.reader = reader
        self._index = index
        self._slots: dict[str, _Slots] = {}
        self._tensors: dict[tuple[str, int], torch.Tensor] = {}

    def present(self, site: str) -> np.ndarray:
        """Which rows of the batch the pass has, a mask."""
        return self._of(site).present

    def digests(self, site: str) -> np.ndarray:
        """int64 `[rows of the batch, 2]`; 0 where there is none."""
        return self._of(site).digest

    def kept(self, site: str) -> np.ndarray:
        """Which rows of the batch have a value, a mask."""
        return self._of(site).shard >= 0

    def find(
        self, site: str, sample: np.ndarray, position: np.ndarray
    ) -> tuple[torch.Tensor | None, np.ndarray]:
        """The values `[n, F]` of the rows at (sample, position) that have one, None where none
        has, and which ones these are, bool `[N]`."""
        number = self._index.rows(sample, position)
        found = np.where(number >= 0, self.kept(site)[number], False)
        return (self.values(site, number[found]) if found.any() else None), found

    def values(self, site: str, number: np.ndarray) -> torch.Tensor:
        """Values `[n, F]` of rows that have one, in the engine's dtype."""
        slots, record = self._of(site), self.reader.record.sites[site]
        out = torch.empty(len(number), record.features, dtype=getattr(torch, record.dtype))
        shard, index = slots.shard[number], slots.index[number]
        for s in np.unique(shard):
            here = torch.from_numpy(np.flatnonzero(shard == s))
            out[here] = self._tensor(site, int(s))[torch.from_numpy(index[shard == s])]
        return out

    def _of(self, site: str) -> _Slots:
        if site not in self._slots:
            size = len(self._index)
            slots = _Slots(
                np.zeros(size, dtype=bool),
                np.zeros((size, 2), dtype=np.int64),
                np.full(size, -1, dtype=np.int64),
                np.full(size, -1, dtype=np.int64),
            )
            rows = self.reader.rows(site)
            if rows is not None:
                number = self._index.rows(rows.sample, rows.position)
                known = np.flatnonzero(number >= 0)
                _, first = np.unique(number[known], return_index=True)
                at = known[first]
                slots.present[number[at]] = True
                slots.digest[number[at]] = rows.digest[at]
                slots.shard[number[at]], slots.index[number[at]] = rows.shard[at], rows.index[at]
            self._slots[site] = slots
        return self._slots[site]

    def _tensor(self, site: str, shard: int) -> torch.Tensor:
        if (site, shard) not in self._tensors:
            path = self.reader.values_file(shard)
            try:
                with safe_open(path, framework="pt") as file:
                    self._tensors[site, shard] = file.get_tensor(site)
            except (OSError, SafetensorError) as error:
                raise CorruptTrace(f"{path}: {site}: {error}") from error
        return self._tensors[site, shard]
