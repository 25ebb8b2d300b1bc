"""rms_norm: y = x / sqrt(mean(x^2) + eps) * weight, optionally of x + residual.

    s = x                                     or round(x + residual) in x's dtype
    r = 1 / sqrt( sum_h s[h]^2 / H + eps )    fp32 (float64 on the torch backend)
    cast="hf":    y = round( weight * round(s * r) )      both roundings to x's dtype
    cast="vllm":  y = round( weight * s * r )             one rounding, from fp32

Reduction order: one row in one program; the sum over H has the fixed order of a block of
next_power_of_2(H) elements, a function of H alone (triton), or is a sum by halves (torch).

Gradients: with n = s * r and g = dy * weight,
    ds = r * (g - n * sum_h(g n) / H)  (+ the gradient of the new residual)   per row, fp32
    dweight = sum over rows of dy * n            blocks of GRAD_ROWS rows, then `columns.py`
the roundings count as the identity. x and residual get the same gradient.

M = rows (all leading dimensions)   H = the normalised dimension
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.backend import choose, record
from rlk_kernels.columns import column_sum
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.exact import by_rows, tree_sum

CASTS = ("hf", "vllm")
GRAD_ROWS = 16
"""Rows whose weight gradients one program adds up, in order."""
MAX_H = 65536


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The formula in float64, without the roundings, for tests."""
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


@triton.jit(do_not_specialize=["M"])
def _rms_norm_fwd_kernel(
    x_ptr, res_ptr, weight_ptr, y_ptr, new_ptr, M, stride_x, stride_r, eps,
    H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HF: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BH)[None, :]
    mask = (rows < M) & (cols < H)
    x = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        res = tl.load(res_ptr + rows * stride_r + cols, mask=mask, other=0.0)
        x = (x.to(tl.float32) + res.to(tl.float32)).to(x.dtype)
        tl.store(new_ptr + rows * H + cols, x, mask=mask)
    s = x.to(tl.float32)
    r = tl.rsqrt(tl.sum(s * s, 1) / H + eps)
    n = s * r[:, None]
    weight = tl.load(weight_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
    if HF:
        n = n.to(y_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y_ptr + rows * H + cols, (n * weight).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _rms_norm_bwd_kernel(
    s_ptr, weight_ptr, dy_ptr, dnew_ptr, ds_ptr, dw_ptr, M, eps,
    H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BH)
    mask = cols < H
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
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


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _inverse_rms(s: Tensor, eps: float) -> Tensor:
    return 1.0 / (tree_sum(s.double().square()) / s.shape[-1] + eps).sqrt()


def _forward_portable(x, residual, weight, eps, hf):
    wide = _wide(x)
    s = x if residual is None else (x.to(wide) + residual.to(wide)).to(x.dtype)
    n = s.to(wide) * _inverse_rms(s, eps).to(wide)
    if hf:
        n = n.to(x.dtype).to(wide)
    y = (n * weight.to(wide)).to(x.dtype)
    return y, s


def _backward_portable(s, weight, dy, dnew, eps):
    wide = _wide(s)
    r = _inverse_rms(s, eps)
    n = s.double() * r
    g = dy.double() * weight.double()
    ds = r * (g - n * (tree_sum(g * n) / s.shape[-1]))
    if dnew is not None:
        ds = ds + dnew.double()
    return ds.to(wide).to(s.dtype), column_sum((dy.double() * n).to(wide), "torch")


@torch.library.custom_op("rlk::rms_norm", mutates_args=())
def _rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, hf: bool, backend: str
) -> tuple[Tensor, Tensor]:
    """y and s; s is empty where there is no residual (x itself serves)."""
    record("rms_norm", backend)
    if backend == "torch":
        y, s = by_rows(lambda a, b: _forward_portable(a, b, weight, eps, hf), x, residual)
        return y, (s if residual is not None else x.new_empty(0))
    m, h = x.shape
    y = torch.empty(m, h, dtype=x.dtype, device=x.device)
    s = torch.empty_like(y) if residual is not None else x.new_empty(0)
    if m:
        block = triton.next_power_of_2(h)
        rows = max(1, 1024 // block)
        _rms_norm_fwd_kernel[(triton.cdiv(m, rows),)](
            x, residual, weight, y, s, m, x.stride(0),
            residual.stride(0) if residual is not None else 0, eps,
            h, block, rows, residual is not None, hf,
            num_warps=min(16, max(2, block // 1024)),
        )  # fmt: skip
    return y, s


@_rms_norm.register_fake
def _(x, residual, weight, eps, hf, backend):
    return x.new_empty(x.shape), x.new_empty(x.shape if residual is not None else (0,))


@torch.library.custom_op("rlk::rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    s: Tensor, weight: Tensor, dy: Tensor, dnew: Tensor | None, eps: float, backend: str
) -> tuple[Tensor, Tensor]:
    record("rms_norm_backward", backend)
    if backend == "torch":
        return _backward_portable(s, weight, dy, dnew, eps)
    m, h = s.shape
    ds = torch.empty_like(dy)
    partial = torch.empty(triton.cdiv(m, GRAD_ROWS), h, dtype=torch.float32, device=s.device)
    if m:
        block = triton.next_power_of_2(h)
        _rms_norm_bwd_kernel[(partial.shape[0],)](
            s, weight, dy, dnew, ds, partial, m, eps, h, block, GRAD_ROWS, dnew is not None,
            num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return ds, column_sum(partial, backend)


@_rms_norm_backward.register_fake
def _(s, weight, dy, dnew, eps, backend):
    return dy.new_empty(dy.shape), weight.new_empty(weight.shape, dtype=_wide(s))


def _setup(ctx, inputs, output):
    x, residual, weight, ctx.eps, _, ctx.backend = inputs
    ctx.fused = residual is not None
    ctx.save_for_backward(output[1] if ctx.fused else x, weight)


def _backward(ctx, dy, dnew):
    s, weight = ctx.saved_tensors
    dnew = dnew.contiguous() if ctx.fused else None
    ds, dw = _rms_norm_backward(s.contiguous(), weight, dy.contiguous(), dnew, ctx.eps, ctx.backend)
    return ds, ds.clone() if ctx.fused else None, dw.to(weight.dtype), None, None, None


_rms_norm.register_autograd(_backward, setup_context=_setup)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    cast: str = "hf",
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMS norm over the last dimension: y, or (y, x + residual) when a residual is given.

    x[..., H], residual[..., H], weight[H]: bfloat16, float16 or float32 (float64 on the torch
    backend); weight may also be float32. H <= 65536. The norm is taken of the rounded new residual.
    `cast` says where y is rounded (module docstring). Raises UnsupportedShape,
    UnsupportedDtype, ValueError.
    """
    h = x.shape[-1] if x.dim() else 0
    if weight.shape != (h,) or not 0 < h <= MAX_H:
        raise UnsupportedShape(
            f"rms_norm: x {tuple(x.shape)} needs weight[{h}] and 1 <= H <= {MAX_H}; "
            f"weight is {tuple(weight.shape)}"
        )
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise UnsupportedShape(
            f"rms_norm: residual {tuple(residual.shape)} {residual.dtype} is not like "
            f"x {tuple(x.shape)} {x.dtype}"
        )
    if weight.dtype not in (x.dtype, torch.float32):
        raise UnsupportedDtype(
            f"rms_norm: weight is {weight.dtype}; {x.dtype} or float32 is needed"
        )
    if cast not in CASTS:
        raise ValueError(f"rms_norm: cast {cast!r} is unknown; choose from {list(CASTS)}")
    if not eps >= 0:
        raise ValueError(f"rms_norm: eps must not be negative, not {eps}")
    chosen = choose("rms_norm", backend, x, weight, residual)
    rows = _rows(x, h)
    res = None if residual is None else _rows(residual, h)
    y, new = _rms_norm(rows, res, weight.contiguous(), eps, cast == "hf", chosen)
    y = y.reshape(x.shape)
    return y if residual is None else (y, new.reshape(x.shape))


def _rows(x: Tensor, h: int) -> Tensor:
    rows = x.reshape(-1, h)
    return rows if rows.stride(-1) == 1 else rows.contiguous()
