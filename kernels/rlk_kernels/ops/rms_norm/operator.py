"""rms_norm: y = x / sqrt(mean(x^2) + eps) * weight, optionally of x + residual.

    s = x                                     or round(x + residual) in x's dtype
    r = 1 / sqrt( sum_h s[h]^2 / H + eps )    fp32 (float64 on the torch backend)
    cast="hf":    y = round( weight * round(s * r) )      both roundings to x's dtype
    cast="vllm":  y = round( weight * s * r )             one rounding, from fp32
    one_plus:     1 + weight, in fp32 and not rounded to the weight's dtype, instead of weight

Reduction order: a row is in one program. The sum over H has the fixed order of a block of
next_power_of_2(H) elements, which depends on H alone (triton), or is a sum by halves (torch).

Gradients: with n = s * r and g = dy * weight,
    ds = r * (g - n * sum_h(g n) / H)  (+ the gradient of the new residual)   per row, fp32
    dweight = sum over rows of dy * n            blocks of GRAD_ROWS rows, then `column_sum`
Roundings are treated as the identity. x and residual get the same gradient.

M = rows (all leading dimensions)   H = the normalised dimension
"""

import torch
from torch import Tensor

from rlk_kernels.backend import choose, two_backends
from rlk_kernels.custom_op import SECOND, call, custom_op
from rlk_kernels.device import lazy_module
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.numerics.dtypes import wide_dtype
from rlk_kernels.ops.arguments import last_dense
from rlk_kernels.ops.rms_norm import portable

CASTS = ("hf", "vllm")
MAX_H = 65536


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The formula in float64, without the roundings, for tests."""
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


_module = two_backends(portable, lazy_module("rlk_kernels.ops.rms_norm.kernels"))


@custom_op(
    "rms_norm_backward",
    lambda s, weight, dy, *rest: (
        dy.new_empty(dy.shape), weight.new_empty(weight.shape, dtype=wide_dtype(s.dtype))
    ),
    no_gradient=("rms_norm", SECOND),
)  # fmt: skip
def _rms_norm_backward(
    s: Tensor, weight: Tensor, dy: Tensor, dnew: Tensor | None, eps: float, one_plus: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _module("rms_norm_backward", backend).backward(s, weight, dy, dnew, eps, one_plus)


def rms_norm_grad(
    s: Tensor, weight: Tensor, dy: Tensor, eps: float, backend: str, dnew: Tensor | None = None,
    one_plus: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(ds[..., H], dweight[H] in weight's dtype) of s[..., H] and dy; `dnew`: the gradient of the
    new residual."""
    rows, drows = (x.contiguous().view(-1, s.shape[-1]) for x in (s, dy))
    ds, dw = call(_rms_norm_backward, rows, weight, drows, dnew, eps, one_plus, backend)
    return ds.view(s.shape), dw.to(weight.dtype)


def _setup(ctx, inputs, output):
    x, residual, weight, ctx.eps, _, ctx.one_plus, ctx.backend = inputs
    ctx.fused = residual is not None
    ctx.save_for_backward(output[1] if ctx.fused else x, weight)


def _backward(ctx, dy, dnew):
    s, weight = ctx.saved_tensors
    dnew = dnew.contiguous() if ctx.fused else None
    ds, dw = rms_norm_grad(s, weight, dy, ctx.eps, ctx.backend, dnew, ctx.one_plus)
    return ds, ds.clone() if ctx.fused else None, dw, None, None, None, None


def _fake(x, residual, *rest):
    return x.new_empty(x.shape), x.new_empty(x.shape if residual is not None else (0,))


@custom_op("rms_norm", _fake, setup=_setup, backward=_backward)
def _rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, hf: bool, one_plus: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y and s; s is empty without a residual, where it would be x."""
    return _module("rms_norm", backend).forward(x, residual, weight, eps, hf, one_plus)


def check_rms_norm(
    op: str, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, cast: str
) -> None:
    """Raises UnsupportedShape, UnsupportedDtype or ValueError if `op` cannot norm x[..., H]."""
    h = x.shape[-1] if x.dim() else 0
    if weight.shape != (h,) or not 0 < h <= MAX_H:
        raise UnsupportedShape(
            f"{op}: x {tuple(x.shape)} needs weight[{h}] and 1 <= H <= {MAX_H}; "
            f"weight is {tuple(weight.shape)}"
        )
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise UnsupportedShape(
            f"{op}: residual {tuple(residual.shape)} {residual.dtype} must have the shape and "
            f"dtype of x {tuple(x.shape)} {x.dtype}"
        )
    if weight.dtype not in (x.dtype, torch.float32):
        raise UnsupportedDtype(f"{op}: weight is {weight.dtype}; {x.dtype} or float32 is needed")
    if cast not in CASTS:
        raise ValueError(f"{op}: cast {cast!r} is unknown; choose from {list(CASTS)}")
    if not eps >= 0:
        raise ValueError(f"{op}: eps must not be negative, not {eps}")


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    cast: str = "hf",
    one_plus: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMS norm over the last dimension: y, or (y, x + residual) when a residual is given.

    x[..., H], residual[..., H], weight[H]: bfloat16, float16 or float32 (float64 on the torch
    backend); weight may also be float32. H <= 65536. The norm is that of the rounded sum with the
    residual. `cast` determines where y is rounded (module docstring); with `one_plus` the norm is
    multiplied by 1 + weight. Raises UnsupportedShape, UnsupportedDtype, ValueError.
    """
    check_rms_norm("rms_norm", x, weight, eps, residual, cast)
    chosen = choose("rms_norm", backend, x, weight, residual)
    rows = x if residual is None and _heads_are_strided(x) else as_rows(x)
    res = None if residual is None else as_rows(residual)
    y, new = call(
        _rms_norm, rows, res, weight.contiguous(), float(eps), cast == "hf", one_plus, chosen
    )
    if x.dim() != rows.dim():
        y, new = y.reshape(x.shape), new if residual is None else new.reshape(x.shape)
    return y if residual is None else (y, new)


def _heads_are_strided(x: Tensor) -> bool:
    """Whether x[T, heads, H] has dense rows but is no matrix, like heads of a fused q, k, v."""
    return x.dim() == 3 and x.stride(2) == 1 and x.stride(0) != x.shape[1] * x.stride(1)


def as_rows(x: Tensor) -> Tensor:
    """x[..., H] as [M, H] with dense rows."""
    return last_dense(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]))
