"""activation: y = f(x), the activation of an MLP without a gate.

    kind="relu2":      y = round( max(x, 0)^2 )
    kind="gelu_tanh":  y = round( x / (1 + exp(-z)) )    z = 2 sqrt(2 / pi) (x + 0.044715 x^3),
                       which is gelu's tanh form, x / 2 (1 + tanh(z / 2))

Arithmetic is fp32, with one rounding. There is no reduction: an output depends on its own input
alone. NaN stays NaN. Gradients, with s = 1 / (1 + exp(-z)):
    relu2:      dx = round( 2 dy max(x, 0) )
    gelu_tanh:  dx = round( dy s (1 + x (1 - s) dz/dx) )

M = rows (all leading dimensions)   F = features
"""

import torch
from torch import Tensor

from rlk_kernels.backend import choose, two_backends
from rlk_kernels.custom_op import SECOND, call, custom_op
from rlk_kernels.device import lazy_module
from rlk_kernels.errors import UnsupportedDtype
from rlk_kernels.ops.activation import portable

KINDS = ("relu2", "gelu_tanh")


def activation_ref(x: Tensor, kind: str) -> Tensor:
    """The formula in float64, for tests."""
    if kind == "gelu_tanh":
        return torch.nn.functional.gelu(x.double(), approximate="tanh")
    return x.double().relu().square()


_module = two_backends(portable, lazy_module("rlk_kernels.ops.activation.kernels"))


@custom_op(
    "activation_backward",
    lambda x, *rest: x.new_empty(x.shape),
    no_gradient=("activation", SECOND),
)
def _activation_backward(x: Tensor, dy: Tensor, gelu: bool, backend: str) -> Tensor:
    return _module("activation_backward", backend).backward(x, dy, gelu)


@custom_op("activation", lambda x, *rest: x.new_empty(x.shape), gradients=(1, _activation_backward))
def _activation(x: Tensor, gelu: bool, backend: str) -> Tensor:
    return _module("activation", backend).forward(x, gelu)


def activation(x: Tensor, kind: str, *, backend: str | None = None) -> Tensor:
    """f(x) for x[..., F] in bfloat16, float16 or float32 (float64 on the torch backend). Raises
    UnsupportedDtype, and ValueError for another kind."""
    if kind not in KINDS:
        raise ValueError(f"activation: kind {kind!r} is unknown; choose from {KINDS}")
    if not x.is_floating_point():
        raise UnsupportedDtype(f"activation: x is {x.dtype}; a floating dtype is needed")
    chosen = choose("activation", backend, x)
    f = x.shape[-1] if x.dim() else 1
    rows = x.contiguous().view(-1 if f else x.numel(), f)
    return call(_activation, rows, kind == "gelu_tanh", chosen).view(x.shape)
