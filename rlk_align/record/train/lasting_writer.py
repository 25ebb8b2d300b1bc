"""The writer of a pass in a training job, which a full disk must not end."""

from typing import Any

import numpy as np
import torch

from rlk_align.errors import TraceNotWritten
from rlk_align.trace.writer import PassWriter


class LastingWriter(PassWriter):
    """Drops rows after a write has failed: this rank goes on with the forwards, in which other
    ranks wait for it. `finish` raises the error."""

    _failure: TraceNotWritten | None = None

    def __call__(
        self, site: str, rows: torch.Tensor, sample: np.ndarray, position: np.ndarray
    ) -> None:
        if self._failure is not None:
            return
        try:
            super().__call__(site, rows, sample, position)
        except TraceNotWritten as error:
            self._failure = error

    def finish(self, *args: Any, **kwargs: Any) -> None:
        if self._failure is not None:
            raise self._failure
        super().finish(*args, **kwargs)
