"""clamped_swiglu: the activation of GPT-OSS's experts.

    g = min(gate, limit)    u = min(max(up, -limit), limit)
    y = round( g / (1 + exp(-alpha g)) * (u + 1) )          fp32 arithmetic, one rounding

There is no reduction: an output depends on its own two inputs alone. NaN stays NaN. Gradients, with
s = 1 / (1 + exp(-alpha g)):
    dgate = round( dy * (u + 1) * s * (1 + alpha g (1 - s)) )     0 where gate > limit
    dup = round( dy * g * s )                                     0 where |up| > limit

M = rows (all leading dimensions)   F = features
"""

import torch
from torch import Tensor

from rlk_kernels.backend import choose, two_backends
from rlk_kernels.custom_op import SECOND, call, custom_op
from rlk_kernels.device import lazy_module
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.ops.clamped_swiglu import portable


def clamped_swiglu_ref(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """The formula in float64, for tests."""
    g, u = gate.double().clamp(max=limit), up.double().clamp(-limit, limit)
    return g * torch.sigmoid(alpha * g) * (u + 1.0)


_module = two_backends(portable, lazy_module("rlk_kernels.ops.clamped_swiglu.kernels"))


@custom_op(
    "clamped_swiglu_backward",
    lambda gate, up, *rest: (gate.new_empty(gate.shape), gate.new_empty(gate.shape)),
    no_gradient=("clamped_swiglu", SECOND),
)
def _clamped_backward(
    gate: Tensor, up: Tensor, dy: Tensor, alpha: float, limit: float, backend: str
) -> tuple[Tensor, Tensor]:
    module = _module("clamped_swiglu_backward", backend)
    return module.backward(gate, up, dy, alpha, limit)


@custom_op(
    "clamped_swiglu",
    lambda gate, *rest: gate.new_empty(gate.shape),
    gradients=(2, _clamped_backward),
)
def _clamped(gate: Tensor, up: Tensor, alpha: float, limit: float, backend: str) -> Tensor:
    return _module("clamped_swiglu", backend).forward(gate, up, alpha, limit)


def clamped_swiglu(
    gate: Tensor, up: Tensor, *, alpha: float, limit: float, backend: str | None = None
) -> Tensor:
    """The formula for gate[..., F] and up[..., F] of one dtype (bfloat16, float16, float32; float64
    on the torch backend). Views of the same strides are read where they are, as x[..., ::2] and
    x[..., 1::2]; others are copied. Raises UnsupportedShape, UnsupportedDtype, and ValueError for a
    limit that is not above 0."""
    if not limit > 0:
        raise ValueError(f"clamped_swiglu: limit must be above 0, not {limit}")
    if gate.shape != up.shape or gate.dim() < 1:
        raise UnsupportedShape(
            f"clamped_swiglu: gate {tuple(gate.shape)} and up {tuple(up.shape)} differ"
        )
    if gate.dtype != up.dtype or not gate.is_floating_point():
        raise UnsupportedDtype(
            f"clamped_swiglu: gate is {gate.dtype} and up is {up.dtype}; cast one"
        )
    chosen = choose("clamped_swiglu", backend, gate, up)
    rows = [t.reshape(t.shape[:-1].numel(), t.shape[-1]) for t in (gate, up)]
    return call(_clamped, *rows, float(alpha), float(limit), chosen).view(gate.shape)
