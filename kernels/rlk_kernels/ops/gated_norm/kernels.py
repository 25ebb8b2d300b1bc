"""The Triton kernels of `gated_rms_norm`: a row is in one program."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.launching import cdiv, launch, power_of_2, shape_cache
from rlk_kernels.memory import empty
from rlk_kernels.numerics.column_sum.operator import column_sum

GRAD_ROWS = 16
"""Rows whose weight gradients one program adds, in order."""


@triton.jit(do_not_specialize=["M"])
def _forward_kernel(
    x_ptr, z_ptr, weight_ptr, y_ptr, M, eps, H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BH)[None, :]
    mask = (rows < M) & (cols < H)
    x = tl.load(x_ptr + rows * H + cols, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + rows * H + cols, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(x * x, 1) / H + eps)
    y = x * r[:, None] * weight * (z / (1.0 + tl.exp(-z)))
    tl.store(y_ptr + rows * H + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _backward_kernel(
    x_ptr, z_ptr, weight_ptr, dy_ptr, dx_ptr, dz_ptr, dw_ptr, M, eps,
    H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BH)
    mask = cols < H
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    dw = tl.zeros((BH,), tl.float32)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for i in range(ROWS):
        row = first + i
        here = mask & (row + tl.zeros((BH,), tl.int64) < M)
        x = tl.load(x_ptr + row * H + cols, mask=here, other=0.0).to(tl.float32)
        z = tl.load(z_ptr + row * H + cols, mask=here, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * H + cols, mask=here, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(x * x, 0) / H + eps)
        n = x * r
        s = 1.0 / (1.0 + tl.exp(-z))
        a = z * s
        d = dy * weight * a
        dx = r * (d - n * (tl.sum(d * n, 0) / H))
        dz = dy * n * weight * s * (1.0 + z * (1.0 - s))
        tl.store(dx_ptr + row * H + cols, dx.to(dx_ptr.dtype.element_ty), mask=here)
        tl.store(dz_ptr + row * H + cols, dz.to(dz_ptr.dtype.element_ty), mask=here)
        dw += dy * n * a
    tl.store(dw_ptr + tl.program_id(0).to(tl.int64) * H + cols, dw, mask=mask)


def forward(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y of x[M, H]."""
    (m, h), y = x.shape, empty(x.shape, x.dtype, x.device)
    if m:
        block = power_of_2(h)
        rows = max(1, 1024 // block)
        launch(
            shape_cache("gated_rms_norm", h, x.dtype, weight.dtype), _forward_kernel,
            (cdiv(m, rows), 1, 1), (x, gate, weight, y, m, eps, h, block, rows), {"num_warps": 4},
        )  # fmt: skip
    return y


def backward(
    x: Tensor, gate: Tensor, weight: Tensor, dy: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dgate, dweight in fp32)."""
    m, h = x.shape
    dx, dz = (empty(x.shape, x.dtype, x.device) for _ in range(2))
    partial = empty((cdiv(m, GRAD_ROWS), h), torch.float32, x.device)
    if m:
        launch(
            shape_cache("gated_rms_norm_backward", h, x.dtype, weight.dtype, dy.dtype),
            _backward_kernel, (partial.shape[0], 1, 1),
            (x, gate, weight, dy, dx, dz, partial, m, eps, h, power_of_2(h), GRAD_ROWS),
            {"num_warps": 4},
        )  # fmt: skip
    return dx, dz, column_sum(partial, "triton")
