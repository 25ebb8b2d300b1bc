"""The open pass of a live engine, in the process of a rank: taps while recorded requests are
computed."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rlk_align.engines.common.site_hooks import SiteHooks
from rlk_align.trace.writer import PassWriter

MakeTaps = Callable[[Any, dict[str, int], list[range]], SiteHooks]
"""(writer, request -> sample, by sample the positions whose logits are wanted) -> taps on the live
model."""


class LivePass:
    """One pass. Hooks are installed only while requests of the pass are in the engine."""

    def __init__(self, writer: PassWriter | None, taps: MakeTaps) -> None:
        """`writer`: that of rank 0; None on the other ranks, which take part in gathering."""
        self._writer = None if writer is None else SafeWriter(writer)
        self._make = taps
        self._taps: SiteHooks | None = None
        self._samples: dict[str, int] = {}
        self._wanted: list[range] = []

    def add(self, request: str, sample: int, wanted: range) -> None:
        """Taps a request before its first forward. `wanted`: the positions whose logits are."""
        self._samples[request] = sample
        self._wanted += [range(0)] * (sample + 1 - len(self._wanted))
        self._wanted[sample] = wanted
        if self._taps is None:
            self._taps = self._make(self._writer, self._samples, self._wanted)
            self._taps.install()

    def remove(self, request: str) -> None:
        """Ends the taps of a request."""
        self._samples.pop(request, None)
        if not self._samples:
            self._close_taps()

    def close(self) -> str:
        """Ends the pass; returns why its rows were not written, or an empty text."""
        self._close_taps()
        return "" if self._writer is None else self._writer.close()

    def _close_taps(self) -> None:
        taps, self._taps = self._taps, None
        if taps is not None:
            taps.close()


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
