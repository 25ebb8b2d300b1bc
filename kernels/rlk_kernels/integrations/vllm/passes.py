"""What the layers of one pass share: a schedule for each window and each kind of call.

vLLM makes the metadata of a batch once a step, for all layers whose keys lie in one cache group,
and drops it after the step; schedules are kept there. So a schedule lives as long as its pass, in
memory of its stream or graph, and no other pass uses it. A graph that is captured whole remakes it
at each replay.
"""

from typing import Any

import torch
from torch import Tensor

import rlk_kernels


class Schedules:
    """The schedules of the layers that are given the same tables and lengths."""

    def __init__(self) -> None:
        self.made: dict[tuple[Any, ...], tuple[rlk_kernels.Schedule | None, set[object]]] = {}

    def of(
        self, layer: object, window: int | None, q: Tensor, k_cache: Tensor, v_cache: Tensor,
        table: Tensor, lens: Tensor, cu_q: Tensor,
    ) -> rlk_kernels.Schedule | None:  # fmt: skip
        """The schedule of a layer's call, made where it is the first of its form.

        A layer asks once a pass. One that asks again is in another pass with the same metadata (a
        trial run, then the capture of a graph), where tables and lengths may hold other values.
        """
        key = (
            window, q.shape, q.dtype, k_cache.shape, k_cache.stride(),
            (k_cache.data_ptr() | v_cache.data_ptr()) & 15, table.shape, table.data_ptr(),
            lens.data_ptr(), cu_q.data_ptr(), *_stream(q.device),
        )  # fmt: skip
        schedule, asked = self.made.get(key, (None, None))
        if asked is None or layer in asked:
            schedule = rlk_kernels.paged_schedule(
                q, k_cache, v_cache, table, lens, cu_seqlens_q=cu_q, window=window
            )
            asked = set()
            self.made[key] = schedule, asked
        asked.add(layer)
        return schedule


def _stream(device: torch.device) -> tuple[int, bool]:
    """(the current stream, whether it is captured)."""
    if device.type != "cuda":
        return 0, False
    stream = torch.cuda.current_stream(device).cuda_stream
    return stream, torch.cuda.is_current_stream_capturing()
