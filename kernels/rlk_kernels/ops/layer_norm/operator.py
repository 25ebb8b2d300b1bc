"""layer_norm: y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias.

    c = x - sum_h x[h] / H
    r = 1 / sqrt( sum_h c[h]^2 / H + eps )          fp32 (float64 on the torch backend)
    y = round( c * r * weight  (+ bias) )           one rounding

Reduction order: a row is in one program. Sums over H have the fixed order of a block of
next_power_of_2(H) elements, which depends on H alone (triton), or are sums by halves (torch).

Gradients: with n = c * r and g = dy * weight,
    dx = r * (g - sum_h(g) / H - n * sum_h(g n) / H)      per row, fp32
    dweight = sum over rows of dy * n     blocks of GRAD_ROWS rows, then `column_sum`
    dbias = sum over rows of dy           likewise
The rounding is treated as the identity.

M = rows (all leading dimensions)   H = the normalised dimension
"""

import torch
from torch import Tensor

from rlk_kernels.backend import choose, two_backends
from rlk_kernels.custom_op import SECOND, call, custom_op
from rlk_kernels.device import lazy_module
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.numerics.dtypes import wide_dtype
from rlk_kernels.ops.layer_norm import portable

MAX_H = 65536


def layer_norm_ref(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """The formula in float64, for tests."""
    c = x.double() - x.double().mean(-1, keepdim=True)
    y = c * (c.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
    return y if bias is None else y + bias.double()


_module = two_backends(portable, lazy_module("rlk_kernels.ops.layer_norm.kernels"))


def _fake_backward(x, weight, dy, *rest):
    of_weight = weight.new_empty(weight.shape, dtype=wide_dtype(x.dtype))
    return dy.new_empty(dy.shape), of_weight, of_weight.new_empty(weight.shape)


@custom_op("layer_norm_backward", _fake_backward, no_gradient=("layer_norm", SECOND))
def _layer_norm_backward(
    x: Tensor, weight: Tensor, dy: Tensor, eps: float, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    return _module("layer_norm_backward", backend).backward(x, weight, dy, eps)


def _setup(ctx, inputs, output):
    x, weight, bias, ctx.eps, ctx.backend = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight)


def _backward(ctx, dy):
    x, weight = ctx.saved_tensors
    dx, dw, db = call(_layer_norm_backward, x, weight, dy.contiguous(), ctx.eps, ctx.backend)
    of_bias = None if ctx.bias_dtype is None else db.to(ctx.bias_dtype)
    return dx, dw.to(weight.dtype), of_bias, None, None


@custom_op("layer_norm", lambda x, *rest: x.new_empty(x.shape), setup=_setup, backward=_backward)
def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, backend: str) -> Tensor:
    return _module("layer_norm", backend).forward(x, weight, bias, eps)


def layer_norm(
    x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None, *,
    backend: str | None = None,
) -> Tensor:  # fmt: skip
    """Layer norm over the last dimension of x[..., H], by weight[H] and bias[H], in bfloat16,
    float16 or float32 (float64 on the torch backend); weight and bias may also be float32. H <=
    65536. Raises UnsupportedShape, UnsupportedDtype, ValueError."""
    h = x.shape[-1] if x.dim() else 0
    shapes = {tuple(p.shape) for p in (weight, bias) if p is not None}
    if shapes != {(h,)} or not 0 < h <= MAX_H:
        raise UnsupportedShape(
            f"layer_norm: x {tuple(x.shape)} needs weight[{h}], a bias[{h}] or none, and 1 <= H <= "
            f"{MAX_H}; they are {sorted(shapes)}"
        )
    allowed = (x.dtype, torch.float32)
    if not x.is_floating_point() or any(
        p is not None and p.dtype not in allowed for p in (weight, bias)
    ):
        raise UnsupportedDtype(
            f"layer_norm: weight is {weight.dtype} and bias "
            f"{None if bias is None else bias.dtype}; {x.dtype} or float32 is needed"
        )
    if not eps >= 0:
        raise ValueError(f"layer_norm: eps must not be negative, not {eps}")
    chosen = choose("layer_norm", backend, x, weight, bias)
    rows = x.reshape(-1, h).contiguous()
    of_bias = None if bias is None else bias.contiguous()
    return call(_layer_norm, rows, weight.contiguous(), of_bias, float(eps), chosen).view(x.shape)
