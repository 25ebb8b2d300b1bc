"""The Triton kernels of `clamped_swiglu`: a program computes BLOCK entries of a row.

gate and up have the same strides, so that those of GPT-OSS, which lie between each other, are read
where they are. Dense ones are a single row.
"""

import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.launching import cdiv, launch, shape_cache
from rlk_kernels.memory import empty

BLOCK = 2048


@triton.jit
def _place(F, stride_m, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """(where the first entry is in gate and up, where in dense rows, the places of the entries
    after it in gate and up and in dense rows, the mask of those in the row)."""
    blocks = tl.cdiv(F, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    first = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    after = tl.arange(0, BLOCK)
    return (
        row * stride_m + first * STRIDE,
        row * F + first,
        after * STRIDE,
        after,
        after < F - first,
    )


@triton.jit
def _clamped(g_ptr, u_ptr, at, mask, limit):
    """(gate, up, gate clamped, up clamped) in fp32. `where` keeps NaN, which a minimum may drop."""
    gate = tl.load(g_ptr + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(u_ptr + at, mask=mask, other=0.0).to(tl.float32)
    u = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate, up, tl.where(gate > limit, limit, gate), u


@triton.jit(do_not_specialize=["F", "stride_m"])
def _clamped_swiglu_fwd_kernel(
    g_ptr, u_ptr, y_ptr, F, stride_m, alpha, limit, STRIDE: tl.constexpr, BLOCK: tl.constexpr
):
    at, dense, strided, after, mask = _place(F, stride_m, STRIDE, BLOCK)
    _, _, g, u = _clamped(g_ptr + at, u_ptr + at, strided, mask, limit)
    y = g / (1.0 + tl.exp(-(alpha * g))) * (u + 1.0)
    tl.store(y_ptr + dense + after, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["F", "stride_m"])
def _clamped_swiglu_bwd_kernel(
    g_ptr, u_ptr, dy_ptr, dg_ptr, du_ptr, F, stride_m, alpha, limit, STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at, dense, strided, after, mask = _place(F, stride_m, STRIDE, BLOCK)
    gate, up, g, u = _clamped(g_ptr + at, u_ptr + at, strided, mask, limit)
    dy = tl.load(dy_ptr + dense + after, mask=mask, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-(alpha * g)))
    dg = dy * (u + 1.0) * s * (1.0 + alpha * g * (1.0 - s))
    dg = tl.where(gate > limit, 0.0, dg)
    du = tl.where(tl.abs(up) > limit, 0.0, dy * g * s)
    tl.store(dg_ptr + dense + after, dg.to(dg_ptr.dtype.element_ty), mask=mask)
    tl.store(du_ptr + dense + after, du.to(du_ptr.dtype.element_ty), mask=mask)


def _alike(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """gate and up, or copies if their strides differ."""
    return (gate, up) if gate.stride() == up.stride() else (gate.contiguous(), up.contiguous())


def _rows(x: Tensor) -> tuple[int, int, int, int]:
    """(rows, entries of a row, stride of rows, stride of entries) of x[M, F]."""
    if x.is_contiguous():
        return 1, x.numel(), 0, 1
    m, f = x.shape
    return m, f, *x.stride()


def forward(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """y of gate[M, F] and up[M, F]."""
    gate, up = _alike(gate, up)
    y = empty(gate.shape, gate.dtype, gate.device)
    m, f, stride_m, stride = _rows(gate)
    if m * f:
        launch(
            shape_cache("clamped_swiglu", gate.dtype, stride),
            _clamped_swiglu_fwd_kernel, (m * cdiv(f, BLOCK), 1, 1),
            (gate, up, y, f, stride_m, alpha, limit, stride, BLOCK), {"num_warps": 4},
        )  # fmt: skip
    return y


def backward(
    gate: Tensor, up: Tensor, dy: Tensor, alpha: float, limit: float
) -> tuple[Tensor, Tensor]:
    """(dgate, dup) of gate[M, F], up[M, F] and a contiguous dy[M, F]."""
    gate, up = _alike(gate, up)
    dg, du = (empty(gate.shape, gate.dtype, gate.device) for _ in range(2))
    m, f, stride_m, stride = _rows(gate)
    if m * f:
        launch(
            shape_cache("clamped_swiglu_backward", gate.dtype, dy.dtype, stride),
            _clamped_swiglu_bwd_kernel, (m * cdiv(f, BLOCK), 1, 1),
            (gate, up, dy, dg, du, f, stride_m, alpha, limit, stride, BLOCK), {"num_warps": 4},
        )  # fmt: skip
    return dg, du
