"""Taps in SGLang's live model, where most forwards have no recorded request."""

from typing import Any

import numpy as np
import torch

from rlk_align.engines.common.places import Place
from rlk_align.engines.common.site_hooks import LiveRows
from rlk_align.engines.sglang.taps import SGLangTaps, row_counts


class LiveTaps(SGLangTaps):
    """Taps that record some of the requests of a batch."""

    def _owner(self, request: str) -> int:
        return self._samples.get(request, -1)

    def _positions(self, positions: torch.Tensor, batch: Any) -> np.ndarray:
        # By SGLang's count of each request's tokens, and not by the positions that the model is
        # called with: a wrong one of these is found by the measured positions.
        counts = row_counts(batch)
        if batch.forward_mode.is_decode():
            return batch.seq_lens_cpu.numpy().astype(np.int64) - 1
        starts = zip(batch.extend_prefix_lens_cpu, counts, strict=True)
        return np.concatenate([np.arange(start, start + count) for start, count in starts])

    def live_rows(self, place: Place, value: torch.Tensor) -> LiveRows | None:
        return super().live_rows(place, value) if len(self._all.sample) else None
