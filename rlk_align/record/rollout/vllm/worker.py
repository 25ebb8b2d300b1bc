"""The recorder of a server in vLLM's worker processes, each with one pass open at a time."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rlk_align.engines.common.places import Place
from rlk_align.engines.common.site_hooks import LiveRows
from rlk_align.engines.vllm.parallel import tensor_parallel
from rlk_align.engines.vllm.taps import VLLMTaps
from rlk_align.engines.vllm.worker import WorkerExtension
from rlk_align.errors import RlkError
from rlk_align.model.shape import ModelShape
from rlk_align.record.rollout.live_pass import LivePass
from rlk_align.trace.writer import PassWriter


class RecordingTaps(VLLMTaps):
    """Taps that record some of the requests of a batch."""

    def _owner(self, request: str) -> int:
        return self._samples.get(request.split("-")[0], -1)

    def _positions(self, positions: torch.Tensor, starts: np.ndarray) -> np.ndarray:
        # By vLLM's count of each request's tokens, and not by the positions that the model is
        # called with: a wrong one of these is found by the measured positions.
        if self._batch is not None:
            return super()._positions(positions, starts)
        counted = self._runner.input_batch.num_computed_tokens_cpu[: len(starts) - 1]
        lengths = np.diff(starts)
        within = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
        return np.repeat(np.asarray(counted, dtype=np.int64), lengths) + within


class LiveTaps(RecordingTaps):
    """Taps in a server, where most forwards have no recorded request."""

    def install(self) -> None:
        super().install()
        nothing = np.zeros(0, dtype=np.int64)
        self._all, self._hidden = LiveRows(None, nothing, nothing, 0), None

    def _locate_logits(self, module: Any, inputs: Any) -> None:
        # Logits of a forward that ran before these taps were installed are not looked at.
        if self._hidden is not None:
            super()._locate_logits(module, inputs)

    def _owner(self, request: str) -> int:
        return self._samples.get(request, -1)

    def live_rows(self, place: Place, value: torch.Tensor | None) -> LiveRows | None:
        return super().live_rows(place, value) if len(self._all.sample) else None


class RecordingWorker(WorkerExtension):
    """Methods that vLLM's `collective_rpc` can call by name."""

    _rlk_pass: LivePass

    def rlk_record_begin(
        self, open_part: Callable[[], PassWriter], shape: ModelShape, kind: str
    ) -> str:
        """Opens a pass; returns why it could not, or an empty text. `kind`: `decode` or
        `prefill`."""
        runner, ranks = self.model_runner, tensor_parallel()

        def taps(writer: Any, samples: dict[str, int], sampled: list[range]) -> LiveTaps:
            return LiveTaps(runner, ranks, shape, writer, None, samples, sampled, kind)

        try:
            self._rlk_pass = LivePass(open_part() if ranks.rank == 0 else None, taps)
        except (RlkError, OSError) as error:
            return str(error)
        return ""

    def rlk_record_add(self, request: str, sample: int, wanted: range) -> None:
        """As `LivePass.add`."""
        self._rlk_pass.add(request, sample, wanted)

    def rlk_record_remove(self, request: str) -> None:
        """As `LivePass.remove`."""
        self._rlk_pass.remove(request)

    def rlk_record_end(self) -> str:
        """As `LivePass.close`."""
        return self._rlk_pass.close()
