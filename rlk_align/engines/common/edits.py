"""Computes the values with which an Intervention overwrites live ones.

n = overwritten rows, f = features of one slice.
"""

import hashlib
from functools import lru_cache

import numpy as np
import torch

from rlk_align.engines.common.intervention import Intervention, RecordedPass
from rlk_align.model.prompts import TokenBatch
from rlk_align.model.sites import RowIndex
from rlk_align.trace.reader import PassReader, Trace
from rlk_align.trace.values import RecordedRows

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Editor:
    """The Intervention of one pass, in the process that computes it."""

    def __init__(self, intervention: Intervention, batch: TokenBatch) -> None:
        self._plan = intervention
        self._index = RowIndex(batch)
        self._source = self._open(intervention.source)
        self._base = self._open(intervention.base)
        self.late = frozenset(intervention.late)
        self.observed = intervention.observed

    @classmethod
    def of(cls, intervention: Intervention | None, batch: TokenBatch) -> "Editor | None":
        """An editor for an intervention; None without an intervention."""
        return None if intervention is None else cls(intervention, batch)

    def _open(self, source: RecordedPass | None) -> RecordedRows | None:
        if source is None:
            return None
        return RecordedRows(_checked_pass(source), self._index)

    def wants(self, site: str) -> bool:
        """Whether the intervention overwrites a site."""
        return self._plan.sites is None or site in self._plan.sites

    def __call__(
        self, site: str, live: torch.Tensor, sample: np.ndarray, position: np.ndarray, start: int
    ) -> tuple[torch.Tensor, np.ndarray]:
        """The values that overwrite `live` `[N, f]`, the features of a site from `start` on: `[n,
        f]` in its dtype, and a mask of the overwritten rows, bool `[N]`."""
        stop = start + live.shape[1]
        if self._plan.kind == "perturb":
            signs = _signs(self._plan.seed, site, sample, position, start, stop).to(live.device)
            return _moved(live, signs * self._plan.ulps), np.ones(len(sample), dtype=bool)
        assert self._source is not None
        value, recorded = self._source.find(site, sample, position)
        if value is None:
            return live[:0], recorded
        if self._plan.kind == "graft":
            return value[:, start:stop].to(live.device, live.dtype), recorded
        assert self._base is not None
        base, in_base = self._base.find(site, sample, position)
        both = recorded & in_base
        if base is None or not both.any():
            return live[:0], both
        change = _widened(value[both[recorded]], start, stop) - _widened(
            base[both[in_base]], start, stop
        )
        here = live[torch.from_numpy(np.flatnonzero(both)).to(live.device)].double()
        return (here + change.to(live.device)).to(live.dtype), both


@lru_cache(maxsize=16)
def _checked_pass(source: RecordedPass) -> PassReader:
    """The reader of a recorded pass: several passes of one job use it, and it compares the files
    with their checksums once."""
    return Trace(source.folder).read_pass(source.passname)


def _widened(rows: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return rows[:, start:stop].double()


def _signs(
    seed: int, site: str, sample: np.ndarray, position: np.ndarray, start: int, stop: int
) -> torch.Tensor:
    """+1 or -1 for each row and feature, int64 `[N, stop - start]`, equal in every process."""
    word = hashlib.blake2b(f"{seed}/{site}".encode(), digest_size=8).digest()
    x = np.frombuffer(word, dtype=np.uint64) + sample.astype(np.uint64) * np.uint64(
        0x9E3779B97F4A7C15
    )
    x = _mixed(_mixed(x) + position.astype(np.uint64))[:, None]
    x = _mixed(x + np.arange(start, stop, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03))
    return torch.from_numpy(np.where(x >> np.uint64(63), 1, -1).astype(np.int64))


def _mixed(x: np.ndarray) -> np.ndarray:
    """splitmix64's finisher."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _moved(live: torch.Tensor, ulps: torch.Tensor) -> torch.Tensor:
    """`live` with each element raised by this many units in the last place. An element that is not
    finite, or would not be, stays as it is."""
    kind = _INTEGERS[live.element_size()]
    lowest = torch.iinfo(kind).min
    bits = live.contiguous().view(kind).long()
    # The bits of negative numbers count downwards: map them so that the next number up is the next
    # integer.
    order = torch.where(bits >= 0, bits, lowest - bits) + ulps
    back = torch.where(order >= 0, order, lowest - order).to(kind).view(live.dtype)
    return torch.where(torch.isfinite(live) & torch.isfinite(back), back, live)
