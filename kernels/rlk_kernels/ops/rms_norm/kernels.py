"""The Triton kernels of `rms_norm`: a row is in one program."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.launching import cdiv, launch, power_of_2, shape_cache
from rlk_kernels.memory import empty
from rlk_kernels.numerics.column_sum.operator import column_sum

GRAD_ROWS = 16
"""Rows whose weight gradients one program adds, in order."""


@triton.jit
def load_weight(weight_ptr, cols, H: tl.constexpr, ONE_PLUS: tl.constexpr):
    """What a norm multiplies by, in fp32."""
    weight = tl.load(weight_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
    return weight + 1.0 if ONE_PLUS else weight


@triton.jit
def added(x, res):
    """x + res, rounded."""
    return (x.to(tl.float32) + res.to(tl.float32)).to(x.dtype)


@triton.jit
def inverse_rms(x, eps, H: tl.constexpr):
    """Of each row of a tile, whose elements from H on are 0."""
    s = x.to(tl.float32)
    return tl.rsqrt(tl.sum(s * s, 1) / H + eps)[:, None]


@triton.jit
def scaled(x, r, weight, HF: tl.constexpr):
    """Some elements of rows, normed by `inverse_rms` and rounded."""
    n = x.to(tl.float32) * r
    if HF:
        n = n.to(x.dtype).to(tl.float32)
    return (n * weight).to(x.dtype)


@triton.jit(do_not_specialize=["M"])
def _rms_norm_fwd_kernel(
    x_ptr, res_ptr, weight_ptr, y_ptr, new_ptr, M, stride_x, stride_head, stride_r, eps,
    H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HF: tl.constexpr, ONE_PLUS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BH)[None, :]
    mask = (rows < M) & (cols < H)
    at = x_ptr + (rows // HEADS) * stride_x + (rows % HEADS) * stride_head + cols
    x = tl.load(at, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        res = tl.load(res_ptr + rows * stride_r + cols, mask=mask, other=0.0)
        x = added(x, res)
        tl.store(new_ptr + rows * H + cols, x, mask=mask)
    y = scaled(x, inverse_rms(x, eps, H), load_weight(weight_ptr, cols, H, ONE_PLUS), HF)
    tl.store(y_ptr + rows * H + cols, y, mask=mask)


@triton.jit(do_not_specialize=["M"])
def _rms_norm_bwd_kernel(
    s_ptr, weight_ptr, dy_ptr, dnew_ptr, ds_ptr, dw_ptr, M, eps,
    H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    ONE_PLUS: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BH)
    mask = cols < H
    weight = load_weight(weight_ptr, cols, H, ONE_PLUS)
    dw = tl.zeros((BH,), tl.float32)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for i in range(ROWS):
        row = first + i
        here = mask & (row + tl.zeros((BH,), tl.int64) < M)
        s = tl.load(s_ptr + row * H + cols, mask=here, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * H + cols, mask=here, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(s * s, 0) / H + eps)
        n = s * r
        g = dy * weight
        ds = r * (g - n * (tl.sum(g * n, 0) / H))
        if HAS_RESIDUAL:
            ds += tl.load(dnew_ptr + row * H + cols, mask=here, other=0.0).to(tl.float32)
        tl.store(ds_ptr + row * H + cols, ds.to(ds_ptr.dtype.element_ty), mask=here)
        dw += dy * n
    tl.store(dw_ptr + tl.program_id(0).to(tl.int64) * H + cols, dw, mask=mask)


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, hf: bool, one_plus: bool
) -> tuple[Tensor, Tensor]:
    """(y, s) of x[M, H], or without a residual of x[T, heads, H], with dense rows; s is
    x + residual, or empty without a residual."""
    shape, dtype, device = x.shape, x.dtype, x.device
    h, heads = shape[-1], shape[1] if len(shape) == 3 else 1
    m = shape[0] * heads
    y = empty(shape, dtype, device)
    s = empty(shape if residual is not None else (0,), dtype, device)
    if m:
        strides = x.stride(), None if residual is None else residual.stride()[0]
        cache = shape_cache("rms_norm", h, heads, strides, dtype, weight.dtype, eps, hf, one_plus)
        if cache.plan is None:
            cache.plan = _plan(h, heads, *strides, eps, hf, one_plus)
        rows, constants, options = cache.plan
        launch(
            cache, _rms_norm_fwd_kernel, (cdiv(m, rows), 1, 1),
            (x, residual, weight, y, s, m, *constants), options,
        )  # fmt: skip
    return y, s


def _plan(
    h: int, heads: int, strides: tuple[int, ...], stride_r: int | None, eps: float, hf: bool,
    one_plus: bool,
) -> tuple[int, tuple, dict]:  # fmt: skip
    """What calls of one shape share: (rows of a program, constants, options)."""
    block = power_of_2(h)
    rows = max(1, 1024 // block)
    constants = (
        strides[0], strides[1] if heads > 1 else 0, stride_r or 0, eps, h, block, rows, heads,
        stride_r is not None, hf, one_plus,
    )  # fmt: skip
    return rows, constants, {"num_warps": min(16, max(2, block // 1024))}


def backward(
    s: Tensor, weight: Tensor, dy: Tensor, dnew: Tensor | None, eps: float, one_plus: bool
) -> tuple[Tensor, Tensor]:
    """(ds, dweight)."""
    m, h = s.shape
    ds = empty(dy.shape, dy.dtype, dy.device)
    partial = empty((cdiv(m, GRAD_ROWS), h), torch.float32, s.device)
    if m:
        block = power_of_2(h)
        cache = shape_cache(
            "rms_norm_backward", h, s.dtype, weight.dtype, dy.dtype, dnew is not None, one_plus
        )
        launch(
            cache, _rms_norm_bwd_kernel, (partial.shape[0], 1, 1),
            (s, weight, dy, dnew, ds, partial, m, eps, h, block, GRAD_ROWS, dnew is not None,
             one_plus),
            {"num_warps": min(16, max(1, block // 512))},
        )  # fmt: skip
    return ds, column_sum(partial, "triton")
