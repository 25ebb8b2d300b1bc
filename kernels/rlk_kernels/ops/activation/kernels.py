"""The Triton kernels of `activation`: a program computes BLOCK entries."""

import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.launching import cdiv, launch, shape_cache
from rlk_kernels.memory import empty
from rlk_kernels.ops.swiglu.kernels import CUBE, GELU

BLOCK = 2048


@triton.jit(do_not_specialize=["N"])
def _activation_fwd_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr, IS_GELU: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(x_ptr + at, mask=at < N, other=0.0).to(tl.float32)
    if IS_GELU:
        z = GELU * (g + CUBE * (g * g * g))
        y = g / (1.0 + tl.exp(-z))
    else:
        r = tl.where(g < 0.0, 0.0, g)  # keeps NaN
        y = r * r
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < N)


@triton.jit(do_not_specialize=["N"])
def _activation_bwd_kernel(x_ptr, dy_ptr, dx_ptr, N, BLOCK: tl.constexpr, IS_GELU: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(x_ptr + at, mask=at < N, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + at, mask=at < N, other=0.0).to(tl.float32)
    if IS_GELU:
        z = GELU * (g + CUBE * (g * g * g))
        s = 1.0 / (1.0 + tl.exp(-z))
        slope = s * (1.0 + g * (1.0 - s) * (GELU * (1.0 + 3 * CUBE * (g * g))))
    else:
        slope = 2.0 * tl.where(g < 0.0, 0.0, g)
    tl.store(dx_ptr + at, (dy * slope).to(dx_ptr.dtype.element_ty), mask=at < N)


def forward(x: Tensor, gelu: bool) -> Tensor:
    """y of a contiguous x."""
    y, n = empty(x.shape, x.dtype, x.device), x.numel()
    if n:
        launch(
            shape_cache("activation", x.dtype, gelu), _activation_fwd_kernel,
            (cdiv(n, BLOCK), 1, 1), (x, y, n, BLOCK, gelu), {"num_warps": 4},
        )  # fmt: skip
    return y


def backward(x: Tensor, dy: Tensor, gelu: bool) -> Tensor:
    """dx of contiguous x and dy."""
    dx, n = empty(x.shape, x.dtype, x.device), x.numel()
    if n:
        launch(
            shape_cache("activation_backward", x.dtype, dy.dtype, gelu), _activation_bwd_kernel,
            (cdiv(n, BLOCK), 1, 1), (x, dy, dx, n, BLOCK, gelu), {"num_warps": 4},
        )  # fmt: skip
    return dx
