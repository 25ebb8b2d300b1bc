"""The Triton kernels of `swiglu`: a program computes BLOCK features of a row.
KIND: the index of the activation in `operator.ACTIVATIONS`."""

import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.launching import cdiv, launch, shape_cache
from rlk_kernels.memory import empty

BLOCK = 2048
GELU, CUBE = tl.constexpr(1.5957691216057308), tl.constexpr(0.044715)
"""2 sqrt(2 / pi), and the factor of gate^3 in gelu's tanh form."""


@triton.jit
def _swiglu_fwd_kernel(
    g_ptr, u_ptr, y_ptr, stride_g, stride_u, F, BLOCK: tl.constexpr, KIND: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < F
    g = tl.load(g_ptr + row * stride_g + cols, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + row * stride_u + cols, mask=mask, other=0.0).to(tl.float32)
    z = g
    if KIND == 1:
        z = GELU * (g + CUBE * (g * g * g))
    y = g / (1.0 + tl.exp(-z)) * u
    if KIND == 2:
        y = 1.0 / (1.0 + tl.exp(-z)) * u
    tl.store(y_ptr + row * F + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_bwd_kernel(
    g_ptr, u_ptr, dy_ptr, dg_ptr, du_ptr, stride_g, stride_u, F,
    BLOCK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < F
    g = tl.load(g_ptr + row * stride_g + cols, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + row * stride_u + cols, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * F + cols, mask=mask, other=0.0).to(tl.float32)
    z = g
    if KIND == 1:
        z = GELU * (g + CUBE * (g * g * g))
    s = 1.0 / (1.0 + tl.exp(-z))
    slope = g * (1.0 - s)
    if KIND == 1:
        slope = slope * (GELU * (1.0 + 3 * CUBE * (g * g)))
    dg = dy * u * s * (1.0 + slope)
    du = dy * g * s
    if KIND == 2:
        dg = dy * u * s * (1.0 - s)
        du = dy * s
    tl.store(dg_ptr + row * F + cols, dg.to(dg_ptr.dtype.element_ty), mask=mask)
    tl.store(du_ptr + row * F + cols, du.to(du_ptr.dtype.element_ty), mask=mask)


MOST_ROWS = 65535
"""The most rows of a launch: CUDA allows so many blocks along the second axis."""


def forward(gate: Tensor, up: Tensor, kind: int = 0) -> Tensor:
    """y of gate[M, F] and up[M, F] with dense rows."""
    shape, dtype = gate.shape, gate.dtype
    m, f = shape
    y = empty(shape, dtype, gate.device)
    gate_stride, up_stride = gate.stride()[0], up.stride()[0]
    cache = shape_cache(f, gate_stride, up_stride, dtype, kind)
    for start in range(0, m if f else 0, MOST_ROWS):
        rows = (gate, up, y) if start == 0 else (gate[start:], up[start:], y[start:])
        launch(
            cache, _swiglu_fwd_kernel, (cdiv(f, BLOCK), min(m - start, MOST_ROWS), 1),
            (*rows, gate_stride, up_stride, f, BLOCK, kind), {"num_warps": 4},
        )  # fmt: skip
    return y


def backward(gate: Tensor, up: Tensor, dy: Tensor, kind: int = 0) -> tuple[Tensor, Tensor]:
    """(dgate, dup)."""
    m, f = gate.shape
    dg, du = (empty((m, f), gate.dtype, gate.device) for _ in range(2))
    cache = shape_cache(
        "swiglu_backward", f, gate.stride(0), up.stride(0), gate.dtype, dy.dtype, kind
    )
    for start in range(0, m if f else 0, MOST_ROWS):
        rows = (gate, up, dy, dg, du)
        launch(
            cache, _swiglu_bwd_kernel, (cdiv(f, BLOCK), min(m - start, MOST_ROWS), 1),
            (*(x[start:] if start else x for x in rows), gate.stride(0), up.stride(0), f, BLOCK,
             kind),
            {"num_warps": 4},
        )  # fmt: skip
    return dg, du
