"""rms_norm of rows that are divided among ranks, by sequences or by heads. It returns y of this
rank's rows, and a gradient of the weight that sums over the rows of all ranks, in the order of one
rank.

    dweight = sum over all rows of dy * n        on rank 0; zeros on the others

A trainer that adds up the weight's gradient over ranks, like Megatron-core, adds zeros to the bits
of one rank, in any order. The backward gathers x and dy for this sum.

M = rows of a rank   H = the normalised dimension   R = ranks
"""

from typing import Any, Literal

import torch
from torch import Tensor

from rlk_kernels.backend import choose
from rlk_kernels.custom_op import on_device_of
from rlk_kernels.ops.rms_norm.operator import rms_norm, rms_norm_grad
from rlk_kernels.parallel.copies import Group, gather, rank_of, size_of

Shared = Literal["sequence", "heads"]
"""The dimension that is divided among ranks: the first of x[S / R, ..., H], or the last but one of
x[..., heads / R, H]."""


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, shared: Shared, group: Group, cast: str,
        backend: str,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.shared, ctx.group, ctx.backend = eps, shared, group, backend
        return rms_norm(x, weight, eps, cast=cast, backend=backend)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dx = dw = None
        with on_device_of(x):
            if ctx.needs_input_grad[0]:
                dx, _ = rms_norm_grad(x, weight, dy, ctx.eps, ctx.backend)
            if ctx.needs_input_grad[1]:
                rows, drows = (_of_all(part, ctx.shared, ctx.group) for part in (x, dy))
                dw = torch.zeros_like(weight)
                if rank_of(ctx.group) == 0:
                    _, dw = rms_norm_grad(rows, weight, drows, ctx.eps, ctx.backend)
        return dx, dw, None, None, None, None, None


def _of_all(part: Tensor, shared: Shared, group: Group) -> Tensor:
    """The rows of all ranks in the order of one rank."""
    parts = gather(part, group)
    if shared == "sequence":
        return parts.flatten(0, 1)
    return parts.movedim(0, -3).flatten(-3, -2)


def rms_norm_parallel(
    x: Tensor, weight: Tensor, eps: float, shared: Shared, group: Group, *, cast: str = "hf",
    backend: str | None = None,
) -> Tensor:  # fmt: skip
    """`rms_norm(x, weight, eps, cast=cast)` of this rank's rows, with the weight's gradient
    described above. Call this, and its backward, on all ranks of the group; None is one rank."""
    if size_of(group) == 1:
        return rms_norm(x, weight, eps, cast=cast, backend=backend)
    chosen = choose("rms_norm", backend, x, weight)
    return _RmsNorm.apply(x, weight, eps, shared, group, cast, chosen)
