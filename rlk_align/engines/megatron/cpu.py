"""Replacements of the CUDA functions that megatron-core calls, so that it computes on a CPU.

They are process-wide, and so installed only inside the worker's process.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


@contextmanager
def cpu_stand_ins() -> Iterator[list[str]]:
    """While entered, megatron-core allocates on the CPU and needs no CUDA generator, even if a GPU
    is present. Yields a description of each replacement."""
    from megatron.core.tensor_parallel import random as tp_random

    current_device = torch.cuda.current_device
    tracker = (tp_random._CUDA_RNG_STATE_TRACKER, tp_random._CUDA_RNG_STATE_TRACKER_INITIALIZED)
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu
    torch.Tensor.cuda = lambda tensor, *_args, **_kwargs: tensor
    # Megatron's tracker for inference forks nothing, and nothing is drawn from it: dropout is 0.
    tp_random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    try:
        yield [
            "torch.cuda.current_device() returns cpu, and Tensor.cuda() moves nothing",
            "the CUDA RNG tracker is megatron-core's inference tracker, which forks nothing",
        ]
    finally:
        torch.cuda.current_device = current_device
        del torch.Tensor.cuda
        tp_random._CUDA_RNG_STATE_TRACKER, tp_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = tracker


@contextmanager
def latent_stand_ins() -> Iterator[list[str]]:
    """While entered, megatron-core's latent attention runs without TransformerEngine. Yields a
    description of each replacement."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.transformer import multi_latent_attention

    if transformer_engine.HAVE_TE:
        yield []
        return
    # Without it, the names of its classes there are no classes.
    usual = multi_latent_attention.HAVE_TE
    multi_latent_attention.HAVE_TE = False
    try:
        yield ["it does not look for TransformerEngine's linears, which are not installed"]
    finally:
        multi_latent_attention.HAVE_TE = usual


@contextmanager
def expert_stand_ins(on_cpu: bool) -> Iterator[list[str]]:
    """While entered, megatron-core's sparse layers run without TransformerEngine, and on a CPU
    without CUDA streams. Yields a description of each replacement."""
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    replaced = []
    with ExitStack() as undo:
        # The router reads this name, which exists only if TransformerEngine is installed.
        if not hasattr(moe_utils, "te_general_gemm"):
            moe_utils.te_general_gemm = None
            undo.callback(delattr, moe_utils, "te_general_gemm")
            replaced.append("the router's product is torch's, without TransformerEngine")
        if on_cpu:
            dispatcher: Any = MoEAlltoAllTokenDispatcher
            copied = ("cuda_dtoh_stream", "_maybe_dtoh_and_synchronize")
            for name, value in zip(copied, (object(), _counts_on_cpu), strict=True):
                undo.callback(setattr, dispatcher, name, vars(dispatcher)[name])
                setattr(dispatcher, name, value)
            replaced.append("the dispatcher does not copy its counts, which are on the CPU already")
        yield replaced


def _counts_on_cpu(dispatcher: Any, _point: str, tokens_per_expert: Any = None) -> Any:
    # With several ranks, torch needs the counts as numbers.
    for name in ("input_splits", "output_splits", "output_splits_tp"):
        counts = getattr(dispatcher, name)
        if isinstance(counts, torch.Tensor):
            setattr(dispatcher, name, counts.numpy())
    return tokens_per_expert
