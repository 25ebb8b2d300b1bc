"""Stand-ins for what megatron-core asks of CUDA, so that it computes on a CPU.

They are process-wide, and therefore made inside the worker's process only.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


@contextmanager
def cpu_stand_ins() -> Iterator[list[str]]:
    """While entered, megatron-core allocates on the CPU and needs no CUDA generator. Yields what it
    replaced, in words. Also right where a GPU is present but not wanted."""
    from megatron.core.tensor_parallel import random as tp_random

    current_device = torch.cuda.current_device
    tracker = (tp_random._CUDA_RNG_STATE_TRACKER, tp_random._CUDA_RNG_STATE_TRACKER_INITIALIZED)
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu
    torch.Tensor.cuda = lambda tensor, *_args, **_kwargs: tensor
    # Megatron's own tracker for inference forks nothing. Nothing is drawn from it: dropout is 0.
    tp_random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    try:
        yield [
            "torch.cuda.current_device() answers cpu, and Tensor.cuda() moves nothing",
            "the CUDA RNG tracker is megatron-core's inference tracker, which forks nothing",
        ]
    finally:
        torch.cuda.current_device = current_device
        del torch.Tensor.cuda
        tp_random._CUDA_RNG_STATE_TRACKER, tp_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = tracker


@contextmanager
def expert_stand_ins(on_cpu: bool) -> Iterator[list[str]]:
    """While entered, megatron-core's sparse layers run without TransformerEngine, and on a CPU
    without CUDA's streams. Yields what it replaced, in words."""
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    replaced = []
    with ExitStack() as undo:
        # It is asked for, and only imported where TransformerEngine is there.
        if not hasattr(moe_utils, "te_general_gemm"):
            moe_utils.te_general_gemm = None
            undo.callback(delattr, moe_utils, "te_general_gemm")
            replaced.append("the router's product is torch's, without TransformerEngine")
        if on_cpu:
            dispatcher: Any = MoEAlltoAllTokenDispatcher
            copied = ("cuda_dtoh_stream", "_maybe_dtoh_and_synchronize")
            for name, value in zip(copied, (object(), _stay), strict=True):
                undo.callback(setattr, dispatcher, name, vars(dispatcher)[name])
                setattr(dispatcher, name, value)
            replaced.append("the dispatcher's counts are on the CPU already")
        yield replaced


def _stay(dispatcher: Any, _point: str, tokens_per_expert: Any = None) -> Any:
    # Of several ranks they are given to torch as numbers.
    for name in ("input_splits", "output_splits", "output_splits_tp"):
        counts = getattr(dispatcher, name)
        if isinstance(counts, torch.Tensor):
            setattr(dispatcher, name, counts.numpy())
    return tokens_per_expert
