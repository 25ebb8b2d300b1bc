"""Deterministic, batch-invariant operators of a transformer: the bits of a row do not depend on
its batch. `backend` says which implementation runs and which one ran."""

import torch

from rlk_kernels.attention import attention, paged_attention
from rlk_kernels.backend import backend_calls, last_backend, reset_backend_calls
from rlk_kernels.embedding import embedding
from rlk_kernels.errors import (
    KernelError,
    UnknownBackend,
    UnsupportedDevice,
    UnsupportedDtype,
    UnsupportedShape,
)
from rlk_kernels.grpo import group_advantages
from rlk_kernels.linear import linear
from rlk_kernels.linear_grpo import linear_grpo_loss
from rlk_kernels.linear_logp import linear_logp
from rlk_kernels.logp import logp
from rlk_kernels.rms_norm import rms_norm
from rlk_kernels.rope import rope
from rlk_kernels.swiglu import swiglu


def warm_up(device: torch.device | str) -> bool:
    """Run the corner-stone check on a GPU (once a process): call it before capturing CUDA graphs.

    True where every tile gives the same bits, so that all of them are in use.
    """
    from rlk_kernels.cornerstone import holds

    device = torch.empty(0, device=device).device
    return all([holds(device), holds(device, chained=True)])


__all__ = [
    "KernelError",
    "UnknownBackend",
    "UnsupportedDevice",
    "UnsupportedDtype",
    "UnsupportedShape",
    "attention",
    "backend_calls",
    "embedding",
    "group_advantages",
    "last_backend",
    "linear",
    "linear_grpo_loss",
    "linear_logp",
    "logp",
    "paged_attention",
    "reset_backend_calls",
    "rms_norm",
    "rope",
    "swiglu",
    "warm_up",
]
