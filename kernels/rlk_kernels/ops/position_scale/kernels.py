"""The Triton kernel of `position_scale`: a program computes BLOCK positions."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.launching import cdiv, launch, shape_cache
from rlk_kernels.memory import empty

BLOCK = 1024


@triton.jit(do_not_specialize=["N", "context"])
def _position_scale_kernel(p_ptr, y_ptr, N, beta, context, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    positions = tl.load(p_ptr + at, mask=at < N, other=0)
    periods = (positions // context).to(tl.float32)
    tl.store(y_ptr + at, 1.0 + beta * tl.log(1.0 + periods), mask=at < N)


def forward(positions: Tensor, beta: float, context: int) -> Tensor:
    """fp32, in the shape of contiguous positions."""
    y = empty(positions.shape, torch.float32, positions.device)
    if n := positions.numel():
        launch(
            shape_cache("position_scale", positions.dtype), _position_scale_kernel,
            (cdiv(n, BLOCK), 1, 1), (positions, y, n, beta, context, BLOCK), {"num_warps": 4},
        )  # fmt: skip
    return y
