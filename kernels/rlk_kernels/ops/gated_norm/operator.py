"""gated_rms_norm: y = x / sqrt(mean(x^2) + eps) * weight * silu(gate).

    r = 1 / sqrt( sum_h x[h]^2 / H + eps )                              fp32 (float64 on torch)
    y = round( x * r * weight * gate / (1 + exp(-gate)) )               one rounding, from fp32

Reduction order: that of `rms_norm`. Gradients, with n = x * r, s = 1 / (1 + exp(-gate)),
a = gate * s and d = dy * weight * a:

    dx = round( r * (d - n * sum_h(d n) / H) )
    dgate = round( dy * n * weight * s * (1 + gate (1 - s)) )
    dweight = sum over rows of dy * n * a         by `column_sum`

M = rows (all leading dimensions)   H = the normalised dimension
"""

import torch
from torch import Tensor

from rlk_kernels.backend import choose, two_backends
from rlk_kernels.custom_op import SECOND, call, custom_op
from rlk_kernels.device import lazy_module
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.numerics.dtypes import wide_dtype
from rlk_kernels.ops.gated_norm import portable

MAX_H = 8192


def gated_rms_norm_ref(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The formula in float64, without the roundings, for tests."""
    x = x.double()
    normed = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
    return normed * torch.nn.functional.silu(gate.double())


_module = two_backends(portable, lazy_module("rlk_kernels.ops.gated_norm.kernels"))


@custom_op(
    "gated_rms_norm_backward",
    lambda x, gate, weight, dy, *rest: (
        x.new_empty(x.shape), x.new_empty(x.shape),
        weight.new_empty(weight.shape, dtype=wide_dtype(x.dtype)),
    ),
    no_gradient=("gated_rms_norm", SECOND),
)  # fmt: skip
def _gated_rms_norm_backward(
    x: Tensor, gate: Tensor, weight: Tensor, dy: Tensor, eps: float, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    return _module("gated_rms_norm_backward", backend).backward(x, gate, weight, dy, eps)


@custom_op(
    "gated_rms_norm", lambda x, *rest: x.new_empty(x.shape), gradients=(3, _gated_rms_norm_backward)
)
def _gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, backend: str) -> Tensor:
    return _module("gated_rms_norm", backend).forward(x, gate, weight, eps)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, backend: str | None = None
) -> Tensor:
    """The RMS norm of x[..., H] times silu(gate[..., H]), rounded once; weight[H].

    x, gate: bfloat16, float16 or float32 (float64 on the torch backend); weight may also be
    float32. H <= 8192. Differentiable in all three. Raises UnsupportedShape, UnsupportedDtype,
    ValueError, and what `backend.choose` raises.
    """
    h = x.shape[-1] if x.dim() else 0
    if gate.shape != x.shape or weight.shape != (h,) or not 0 < h <= MAX_H:
        raise UnsupportedShape(
            f"gated_rms_norm: x and gate[..., H] and weight[H], 1 <= H <= {MAX_H}, are needed, not "
            f"{tuple(x.shape)}, {tuple(gate.shape)}, {tuple(weight.shape)}"
        )
    floating = x.is_floating_point() and x.dtype == gate.dtype
    if not floating or weight.dtype not in (x.dtype, torch.float32):
        raise UnsupportedDtype(
            f"gated_rms_norm: x is {x.dtype}, gate {gate.dtype} and weight {weight.dtype}; one "
            "floating dtype is needed, or float32 for the weight"
        )
    if not eps >= 0:
        raise ValueError(f"gated_rms_norm: eps must not be negative, not {eps}")
    chosen = choose("gated_rms_norm", backend, x, gate, weight)
    rows = (t.reshape(-1, h).contiguous() for t in (x, gate))
    y = call(_gated_rms_norm, *rows, weight.contiguous(), float(eps), chosen)
    return y if x.dim() == 2 else y.reshape(x.shape)
