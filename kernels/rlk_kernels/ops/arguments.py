"""Checks of arguments that several operators take."""

import torch
from torch import Tensor

from rlk_kernels.errors import UnsupportedShape


def int32_vector(op: str, name: str, x: Tensor, size: int | None = None) -> Tensor:
    """x[size] as dense int32; x[B + 1] for any B if `size` is None. Raises UnsupportedShape for
    another shape, and for a dtype other than int32 and int64."""
    fits = x.dim() == 1 and x.numel() > 0 if size is None else x.shape == (size,)
    if x.dtype not in (torch.int32, torch.int64) or not fits:
        raise UnsupportedShape(
            f"{op}: {name} must have {'B + 1' if size is None else size} integers, not {x.dtype} "
            f"{tuple(x.shape)}"
        )
    return x.to(torch.int32).contiguous()


def last_dense(x: Tensor) -> Tensor:
    """x, or a copy of x if its last dimension is not dense."""
    return x if x.stride()[-1] == 1 else x.contiguous()
