"""swiglu: y = silu(gate) * up.

    y = round( gate / (1 + exp(-gate)) * up )           fp32 arithmetic, one rounding

There is no reduction: an output depends on its own two inputs alone. Gradients, with
s = sigmoid(gate):
    dgate = round( dy * up * s * (1 + gate * (1 - s)) )      dup = round( dy * gate * s )

M = rows (all leading dimensions)   F = features
"""

import torch
from torch import Tensor

from rlk_kernels.backend import choose, two_backends
from rlk_kernels.custom_op import SECOND, call, custom_op
from rlk_kernels.device import lazy_module
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.ops.swiglu import portable


def swiglu_ref(gate: Tensor, up: Tensor) -> Tensor:
    """The formula in float64, for tests."""
    return torch.nn.functional.silu(gate.double()) * up.double()


_module = two_backends(portable, lazy_module("rlk_kernels.ops.swiglu.kernels"))


@custom_op(
    "swiglu_backward",
    lambda gate, up, *rest: (gate.new_empty(gate.shape), gate.new_empty(gate.shape)),
    no_gradient=("swiglu", SECOND),
)
def _swiglu_backward(gate: Tensor, up: Tensor, dy: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    return _module("swiglu_backward", backend).backward(gate, up, dy)


def _setup(ctx, inputs, output):
    gate, up, ctx.backend = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx, dy):
    return *call(_swiglu_backward, *ctx.saved_tensors, dy.contiguous(), ctx.backend), None


@custom_op(
    "swiglu", lambda gate, *rest: gate.new_empty(gate.shape), setup=_setup, backward=_backward
)
def _swiglu(gate: Tensor, up: Tensor, backend: str) -> Tensor:
    return _module("swiglu", backend).forward(gate, up)


def swiglu(gate: Tensor, up: Tensor, *, backend: str | None = None) -> Tensor:
    """silu(gate) * up for gate[..., F], up[..., F] of one dtype (bfloat16, float16, float32;
    float64 on the torch backend). Halves of a fused gate_up tensor are read in place.
    Raises UnsupportedShape, UnsupportedDtype.
    """
    if gate.shape != up.shape or gate.dim() < 1:
        raise UnsupportedShape(f"swiglu: gate {tuple(gate.shape)} and up {tuple(up.shape)} differ")
    if gate.dtype != up.dtype or not gate.is_floating_point():
        raise UnsupportedDtype(f"swiglu: gate is {gate.dtype} and up is {up.dtype}; cast one")
    chosen = choose("swiglu", backend, gate, up)
    f = gate.shape[-1]
    rows = [gate, up]
    if gate.dim() != 2:
        rows = [t.reshape(-1 if f else t.shape[:-1].numel(), f) for t in rows]
    rows = [t if t.stride(-1) == 1 else t.contiguous() for t in rows]
    y = call(_swiglu, rows[0], rows[1], chosen)
    return y if gate.dim() == 2 else y.reshape(gate.shape)
