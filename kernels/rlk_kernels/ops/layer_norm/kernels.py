"""The Triton kernels of `layer_norm`: a row is in one program."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.launching import cdiv, launch, power_of_2, shape_cache
from rlk_kernels.memory import empty
from rlk_kernels.numerics.column_sum.operator import column_sum

GRAD_ROWS = 16
"""Rows whose gradients of weight and bias one program adds, in order."""


@triton.jit(do_not_specialize=["M"])
def _layer_norm_fwd_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, M, eps, H: tl.constexpr, BH: tl.constexpr,
    ROWS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BH)[None, :]
    mask = (rows < M) & (cols < H)
    x = tl.load(x_ptr + rows * H + cols, mask=mask, other=0.0).to(tl.float32)
    c = tl.where(cols < H, x - (tl.sum(x, 1) / H)[:, None], 0.0)
    r = tl.rsqrt(tl.sum(c * c, 1) / H + eps)
    y = c * r[:, None] * tl.load(weight_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
    tl.store(y_ptr + rows * H + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _layer_norm_bwd_kernel(
    x_ptr, weight_ptr, dy_ptr, dx_ptr, dw_ptr, db_ptr, M, eps,
    H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BH)
    mask = cols < H
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    dw = tl.zeros((BH,), tl.float32)
    db = tl.zeros((BH,), tl.float32)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for i in range(ROWS):
        row = first + i
        here = mask & (row + tl.zeros((BH,), tl.int64) < M)
        x = tl.load(x_ptr + row * H + cols, mask=here, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * H + cols, mask=here, other=0.0).to(tl.float32)
        c = tl.where(here, x - tl.sum(x, 0) / H, 0.0)
        r = tl.rsqrt(tl.sum(c * c, 0) / H + eps)
        n = c * r
        g = dy * weight
        dx = r * (g - tl.sum(g, 0) / H - n * (tl.sum(g * n, 0) / H))
        tl.store(dx_ptr + row * H + cols, dx.to(dx_ptr.dtype.element_ty), mask=here)
        dw += dy * n
        db += dy
    at = tl.program_id(0).to(tl.int64) * H + cols
    tl.store(dw_ptr + at, dw, mask=mask)
    tl.store(db_ptr + at, db, mask=mask)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """y of a contiguous x[M, H]."""
    m, h = x.shape
    y = empty(x.shape, x.dtype, x.device)
    if m:
        block = power_of_2(h)
        rows = max(1, 1024 // block)
        of_bias = None if bias is None else bias.dtype
        launch(
            shape_cache("layer_norm", h, x.dtype, weight.dtype, of_bias), _layer_norm_fwd_kernel,
            (cdiv(m, rows), 1, 1), (x, weight, bias, y, m, eps, h, block, rows, bias is not None),
            {"num_warps": min(16, max(2, block // 1024))},
        )  # fmt: skip
    return y


def backward(x: Tensor, weight: Tensor, dy: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias) of contiguous x and dy, the last two in fp32."""
    m, h = x.shape
    dx = empty(dy.shape, dy.dtype, dy.device)
    dw, db = (empty((cdiv(m, GRAD_ROWS), h), torch.float32, x.device) for _ in range(2))
    if m:
        block = power_of_2(h)
        launch(
            shape_cache("layer_norm_backward", h, x.dtype, weight.dtype, dy.dtype),
            _layer_norm_bwd_kernel, (dw.shape[0], 1, 1),
            (x, weight, dy, dx, dw, db, m, eps, h, block, GRAD_ROWS),
            {"num_warps": min(16, max(1, block // 512))},
        )  # fmt: skip
    return dx, column_sum(dw, "triton"), column_sum(db, "triton")
