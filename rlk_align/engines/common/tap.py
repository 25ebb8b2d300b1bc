"""The tap: the receiver of the rows that an observed pass computes."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from rlk_align.trace.writer import PassWriter


class Tap(Protocol):
    """Receives the rows of an observed pass as the engine computes them."""

    def __call__(
        self, site: str, rows: torch.Tensor, sample: np.ndarray, position: np.ndarray, /
    ) -> None:
        """Takes rows `[N, F]` of a site at (sample, position), int `[N]` each. They are copied
        before this returns, because engines overwrite their buffers."""

    def overwritten(self, site: str, rows: int, /) -> None:
        """Takes the number of live rows of a site that an intervention overwrote."""

    def computes(self, rank: int, sample: int, rows: range, sharing: Sequence[int] = (), /) -> None:
        """Takes the rows of a sample that a rank computes; several ranks may compute the same rows.
        `sharing`: the ranks that share the features of these rows; empty for all ranks."""

    def part(self, number: int, /) -> Callable[[], PassWriter]:
        """Returns a function that opens another part of the same pass, in any process."""
