"""swiglu: y = silu(gate) * up, or with another activation in silu's place.

    y = round( gate / (1 + exp(-z)) * up )              fp32 arithmetic, one rounding
    activation="silu":       z = gate
    activation="gelu_tanh":  z = 2 sqrt(2 / pi) (gate + 0.044715 gate^3), with which gate / (1 +
                             exp(-z)) is gelu's tanh form, gate / 2 (1 + tanh(z / 2))
    activation="sigmoid":    y = round( 1 / (1 + exp(-gate)) * up ), for the output of an attention

There is no reduction: an output depends on its own two inputs alone. Gradients, with
s = 1 / (1 + exp(-z)):
    dgate = round( dy * up * s * (1 + gate * (1 - s) * dz/dgate) )      dup = round( dy * gate * s )
    sigmoid: dgate = round( dy * up * s * (1 - s) )                     dup = round( dy * s )

M = rows (all leading dimensions)   F = features
"""

import torch
from torch import Tensor

from rlk_kernels.backend import choose, two_backends
from rlk_kernels.custom_op import SECOND, call, custom_op
from rlk_kernels.device import lazy_module
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.ops.arguments import last_dense
from rlk_kernels.ops.swiglu import portable

ACTIVATIONS = ("silu", "gelu_tanh", "sigmoid")
"""The index of an activation is its number in the custom operators and kernels."""


def swiglu_ref(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """The formula in float64, for tests."""
    if activation == "gelu_tanh":
        return torch.nn.functional.gelu(gate.double(), approximate="tanh") * up.double()
    if activation == "sigmoid":
        return gate.double().sigmoid() * up.double()
    return torch.nn.functional.silu(gate.double()) * up.double()


_module = two_backends(portable, lazy_module("rlk_kernels.ops.swiglu.kernels"))


@custom_op(
    "swiglu_backward",
    lambda gate, up, *rest: (gate.new_empty(gate.shape), gate.new_empty(gate.shape)),
    no_gradient=("swiglu", SECOND),
)
def _swiglu_backward(
    gate: Tensor, up: Tensor, dy: Tensor, kind: int, backend: str
) -> tuple[Tensor, Tensor]:
    return _module("swiglu_backward", backend).backward(gate, up, dy, kind)


@custom_op(
    "swiglu", lambda gate, *rest: gate.new_empty(gate.shape), gradients=(2, _swiglu_backward)
)
def _swiglu(gate: Tensor, up: Tensor, kind: int, backend: str) -> Tensor:
    return _module("swiglu", backend).forward(gate, up, kind)


def swiglu(
    gate: Tensor, up: Tensor, *, activation: str = "silu", backend: str | None = None
) -> Tensor:
    """silu(gate) * up, or activation(gate) * up, for gate[..., F], up[..., F] of one dtype
    (bfloat16, float16, float32; float64 on the torch backend). Halves of a fused gate_up tensor
    are read in place. Raises UnsupportedShape, UnsupportedDtype, ValueError.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"swiglu: activation {activation!r} is unknown; choose from {ACTIVATIONS}")
    if gate.shape != up.shape or gate.dim() < 1:
        raise UnsupportedShape(f"swiglu: gate {tuple(gate.shape)} and up {tuple(up.shape)} differ")
    if gate.dtype != up.dtype or not gate.is_floating_point():
        raise UnsupportedDtype(f"swiglu: gate is {gate.dtype} and up is {up.dtype}; cast one")
    chosen = choose("swiglu", backend, gate, up)
    f = gate.shape[-1]
    rows = [gate, up]
    if gate.dim() != 2:
        rows = [t.reshape(-1 if f else t.shape[:-1].numel(), f) for t in rows]
    rows = [last_dense(t) for t in rows]
    y = call(_swiglu, rows[0], rows[1], ACTIVATIONS.index(activation), chosen)
    return y if gate.dim() == 2 else y.reshape(gate.shape)
