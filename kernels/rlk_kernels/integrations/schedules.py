"""The attention schedules that the layers of a pass share: one for each window and each shape of
call.

vLLM and SGLang build the metadata of a batch once in a step, vLLM for all layers whose keys are in
one cache group, and drop it after the step. The schedules are stored there, so a schedule lives as
long as its pass, in the memory of its stream or graph, and no other pass uses it. A graph that is
captured as a whole computes the schedule again at each replay."""

from typing import Any

import torch
from torch import Tensor

import rlk_kernels
from rlk_kernels import private_api


class Schedules:
    """The schedules of layers with the same tables and lengths."""

    def __init__(self) -> None:
        self.made: dict[tuple[Any, ...], tuple[rlk_kernels.Schedule | None, set[object]]] = {}

    def of(
        self, layer: object, window: int | None, softcap: float | None, q: Tensor,
        k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, cu_q: Tensor,
    ) -> rlk_kernels.Schedule | None:  # fmt: skip
        """The schedule of a layer's call; the first call of its shape creates it.

        A layer asks once in a pass. If it asks again, another pass has the same metadata (a trial
        run, and then the capture of a graph), in which tables and lengths may have other values.
        """
        if table.shape[0] == 1:
            return None  # a lone sequence needs no list
        key = (
            window, softcap, q.shape, q.dtype, k_cache.shape, k_cache.stride(),
            (k_cache.data_ptr() | v_cache.data_ptr()) & 15, table.shape, table.data_ptr(),
            lens.data_ptr(), cu_q.data_ptr(), *_stream(q.device),
        )  # fmt: skip
        schedule, asked = self.made.get(key, (None, None))
        if asked is None or layer in asked:
            schedule = rlk_kernels.paged_schedule(
                q, k_cache, v_cache, table, lens, cu_seqlens_q=cu_q, window=window,
                softcap=softcap,
            )  # fmt: skip
            asked = set()
            self.made[key] = schedule, asked
        asked.add(layer)
        return schedule


def _stream(device: torch.device) -> tuple[int, bool]:
    """(the current stream, whether a graph is captured on it)."""
    if device.type != "cuda":
        return 0, False
    return private_api.current_stream(device.index), torch.cuda.is_current_stream_capturing()
