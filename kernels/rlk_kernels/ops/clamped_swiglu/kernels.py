"""The Triton kernels of `clamped_swiglu`: a program computes BLOCK entries."""

import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.launching import cdiv, launch, shape_cache
from rlk_kernels.memory import empty

BLOCK = 2048


@triton.jit
def _clamped(g_ptr, u_ptr, at, mask, limit):
    """(gate, up, gate clamped, up clamped) in fp32. `where` keeps NaN, which a minimum may drop."""
    gate = tl.load(g_ptr + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(u_ptr + at, mask=mask, other=0.0).to(tl.float32)
    u = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate, up, tl.where(gate > limit, limit, gate), u


@triton.jit(do_not_specialize=["N"])
def _clamped_swiglu_fwd_kernel(g_ptr, u_ptr, y_ptr, N, alpha, limit, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _, _, g, u = _clamped(g_ptr, u_ptr, at, at < N, limit)
    y = g / (1.0 + tl.exp(-(alpha * g))) * (u + 1.0)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < N)


@triton.jit(do_not_specialize=["N"])
def _clamped_swiglu_bwd_kernel(
    g_ptr, u_ptr, dy_ptr, dg_ptr, du_ptr, N, alpha, limit, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate, up, g, u = _clamped(g_ptr, u_ptr, at, at < N, limit)
    dy = tl.load(dy_ptr + at, mask=at < N, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-(alpha * g)))
    dg = dy * (u + 1.0) * s * (1.0 + alpha * g * (1.0 - s))
    dg = tl.where(gate > limit, 0.0, dg)
    du = tl.where(tl.abs(up) > limit, 0.0, dy * g * s)
    tl.store(dg_ptr + at, dg.to(dg_ptr.dtype.element_ty), mask=at < N)
    tl.store(du_ptr + at, du.to(du_ptr.dtype.element_ty), mask=at < N)


def forward(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """y of contiguous gate and up."""
    y, n = empty(gate.shape, gate.dtype, gate.device), gate.numel()
    if n:
        launch(
            shape_cache("clamped_swiglu", gate.dtype),
            _clamped_swiglu_fwd_kernel, (cdiv(n, BLOCK), 1, 1),
            (gate, up, y, n, alpha, limit, BLOCK), {"num_warps": 4},
        )  # fmt: skip
    return y


def backward(
    gate: Tensor, up: Tensor, dy: Tensor, alpha: float, limit: float
) -> tuple[Tensor, Tensor]:
    """(dgate, dup) of contiguous gate, up and dy."""
    dg, du = (empty(gate.shape, gate.dtype, gate.device) for _ in range(2))
    if n := gate.numel():
        launch(
            shape_cache("clamped_swiglu_backward", gate.dtype, dy.dtype),
            _clamped_swiglu_bwd_kernel, (cdiv(n, BLOCK), 1, 1),
            (gate, up, dy, dg, du, n, alpha, limit, BLOCK), {"num_warps": 4},
        )  # fmt: skip
    return dg, du
