"""What an observed pass gives its rows to."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from rlk_align.trace.writer import PassWriter


class Tap(Protocol):
    """What an observed pass gives its rows to, as the engine computes."""

    def __call__(
        self, site: str, rows: torch.Tensor, sample: np.ndarray, position: np.ndarray, /
    ) -> None:
        """Rows `[N, F]` of a site at (sample, position), int `[N]` each; copied before it
        returns, because engines overwrite their buffers."""

    def overwritten(self, site: str, rows: int, /) -> None:
        """So many live rows of a site were overwritten by an intervention."""

    def held(self, sample: int, rows: range, rank: int, sharing: Sequence[int] = (), /) -> None:
        """One rank alone computes these rows of a sample, or it and others that say so too, but
        for what is shared by features: by the ranks `sharing`, or by all where there are none."""

    def part(self, number: int, /) -> Callable[[], PassWriter]:
        """What opens another part of the same pass, in whichever process it is called."""
