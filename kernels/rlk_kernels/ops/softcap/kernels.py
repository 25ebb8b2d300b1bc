"""The Triton kernels of `softcap`: a program computes BLOCK entries."""

import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.launching import cdiv, launch, shape_cache
from rlk_kernels.matmul.epilogue import softcapped
from rlk_kernels.memory import empty

BLOCK = 2048


@triton.jit(do_not_specialize=["N"])
def _softcap_fwd_kernel(x_ptr, y_ptr, N, cap, inverse_cap, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < N, other=0.0).to(tl.float32)
    y = softcapped(x, cap, inverse_cap)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < N)


@triton.jit(do_not_specialize=["N"])
def _softcap_bwd_kernel(y_ptr, dy_ptr, dx_ptr, N, inverse_cap, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tanh = tl.load(y_ptr + at, mask=at < N, other=0.0).to(tl.float32) * inverse_cap
    dy = tl.load(dy_ptr + at, mask=at < N, other=0.0).to(tl.float32)
    tl.store(dx_ptr + at, (dy * (1.0 - tanh * tanh)).to(dx_ptr.dtype.element_ty), mask=at < N)


def forward(x: Tensor, cap: float) -> Tensor:
    """y of a contiguous x."""
    y, n = empty(x.shape, x.dtype, x.device), x.numel()
    if n:
        launch(
            shape_cache("softcap", x.dtype), _softcap_fwd_kernel, (cdiv(n, BLOCK), 1, 1),
            (x, y, n, cap, 1.0 / cap, BLOCK), {"num_warps": 4},
        )  # fmt: skip
    return y


def backward(y: Tensor, dy: Tensor, cap: float) -> Tensor:
    """dx of contiguous y and dy."""
    dx, n = empty(y.shape, y.dtype, y.device), y.numel()
    if n:
        launch(
            shape_cache("softcap_backward", y.dtype, dy.dtype), _softcap_bwd_kernel,
            (cdiv(n, BLOCK), 1, 1), (y, dy, dx, n, 1.0 / cap, BLOCK), {"num_warps": 4},
        )  # fmt: skip
    return dx
