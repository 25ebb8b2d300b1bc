"""The recorder of a server in vLLM's worker processes: taps while recorded requests are computed.

A worker has one pass open at a time. Hooks are installed only while requests of the pass are in the
engine, and read nothing from a forward that has none of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
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


class SafeWriter:
    """Passes rows on until an error, after which the pass is lost and the server goes on."""

    def __init__(self, writer: PassWriter) -> None:
        self._writer = writer
        self.failure = ""

    def __call__(
        self, site: str, rows: torch.Tensor, sample: np.ndarray, position: np.ndarray
    ) -> None:
        if self.failure:
            return
        try:
            self._writer(site, rows, sample, position)
        except Exception as error:
            self.failure = str(error) or type(error).__name__

    def close(self) -> str:
        """Writes the rest; returns why the pass is lost, or an empty text."""
        try:
            if not self.failure:
                self._writer.close()
        except Exception as error:
            self.failure = str(error) or type(error).__name__
        return self.failure


@dataclass(slots=True)
class _OpenPass:
    shape: ModelShape
    kind: str
    writer: SafeWriter | None
    """That of rank 0; None on the other ranks."""
    samples: dict[str, int] = field(default_factory=dict)
    sampled: list[range] = field(default_factory=list)
    taps: LiveTaps | None = None


class RecordingWorker(WorkerExtension):
    """Methods that vLLM's `collective_rpc` can call by name."""

    _rlk_pass: _OpenPass

    def rlk_record_begin(
        self, open_part: Callable[[], PassWriter], shape: ModelShape, kind: str
    ) -> str:
        """Opens a pass; returns why it could not, or an empty text. `kind`: `decode` or
        `prefill`."""
        writer = None
        if tensor_parallel().rank == 0:
            try:
                writer = SafeWriter(open_part())
            except (RlkError, OSError) as error:
                return str(error)
        self._rlk_pass = _OpenPass(shape, kind, writer)
        return ""

    def rlk_record_add(self, request: str, sample: int, first: int) -> None:
        """Taps a request before its first forward. `first`: its first position whose next token is
        sampled."""
        current = self._rlk_pass
        current.samples[request] = sample
        current.sampled += [range(0)] * (sample + 1 - len(current.sampled))
        current.sampled[sample] = range(first, current.shape.context)
        if current.taps is None:
            current.taps = LiveTaps(
                self.model_runner,
                tensor_parallel(),
                current.shape,
                current.writer,  # type: ignore[arg-type]
                None,
                current.samples,
                current.sampled,
                current.kind,
            )
            current.taps.install()

    def rlk_record_remove(self, request: str) -> None:
        """Ends the taps of a request."""
        current = self._rlk_pass
        current.samples.pop(request, None)
        if not current.samples:
            self._rlk_close_taps()

    def rlk_record_end(self) -> str:
        """Closes the pass; returns why it could not be written, or an empty text."""
        self._rlk_close_taps()
        writer = self._rlk_pass.writer
        return "" if writer is None else writer.close()

    def _rlk_close_taps(self) -> None:
        taps, self._rlk_pass.taps = self._rlk_pass.taps, None
        if taps is not None:
            taps.close()
