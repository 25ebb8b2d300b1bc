"""delta_gates: the decay g and the step beta of a gated delta net, by head.

    g = -exp(a_log) * softplus(a + dt_bias)    fp32, not rounded to a's dtype
    beta = round( 1 / (1 + exp(-b)) )          to b's dtype
    softplus(x) = max(x, 0) + log(1 + exp(-|x|))

in fp32 (float64 on the torch backend); there is no reduction. Gradients, with s(x) = 1 / (1 +
exp(-x)):

    da = round( -dg exp(a_log) s(a + dt_bias) )    db = round( dbeta s(b) (1 - s(b)) )
    da_log = sum over rows of dg g                 ddt_bias = sum over rows of da, not rounded

by `column_sum`.

T = rows   H = heads of v
"""

import torch
from torch import Tensor

from rlk_kernels.backend import choose, two_backends
from rlk_kernels.custom_op import SECOND, call, custom_op
from rlk_kernels.device import lazy_module
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.numerics.dtypes import wide_dtype
from rlk_kernels.ops.delta_gates import portable


def delta_gates_ref(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """(g, beta) by the formula in float64, for tests."""
    x = a.double() + dt_bias.double()
    return -a_log.double().exp() * torch.logaddexp(x, x.new_zeros(())), b.double().sigmoid()


_module = two_backends(portable, lazy_module("rlk_kernels.ops.delta_gates.kernels"))


@custom_op(
    "delta_gates_backward",
    lambda a, b, a_log, dt_bias, dg, *rest: (
        a.new_empty(a.shape), b.new_empty(b.shape), dg.new_empty(a_log.shape),
        dg.new_empty(dt_bias.shape),
    ),
    no_gradient=("delta_gates", SECOND),
)  # fmt: skip
def _delta_gates_backward(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, dg: Tensor, dbeta: Tensor, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    module = _module("delta_gates_backward", backend)
    return module.backward(a, b, a_log, dt_bias, dg, dbeta)


@custom_op(
    "delta_gates",
    lambda a, b, *rest: (a.new_empty(a.shape, dtype=wide_dtype(a.dtype)), b.new_empty(b.shape)),
    gradients=(4, _delta_gates_backward),
)  # fmt: skip
def _delta_gates(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, backend: str
) -> tuple[Tensor, Tensor]:
    return _module("delta_gates", backend).forward(a, b, a_log, dt_bias)


def delta_gates(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """(g, beta)[T, H] of a and b[T, H], a_log and dt_bias[H]; g is float32, beta in b's dtype.

    a, b: bfloat16, float16 or float32 (float64 on the torch backend, with g in float64); a_log and
    dt_bias may also be float32. Differentiable in all four. Raises UnsupportedShape,
    UnsupportedDtype, and what `backend.choose` raises.
    """
    if a.dim() != 2 or a.shape != b.shape or not a_log.shape == dt_bias.shape == a.shape[1:]:
        raise UnsupportedShape(
            "delta_gates: a and b[T, H], a_log and dt_bias[H] are needed, not "
            f"{tuple(a.shape)}, {tuple(b.shape)}, {tuple(a_log.shape)}, {tuple(dt_bias.shape)}"
        )
    allowed = (a.dtype, torch.float32)
    if a.dtype != b.dtype or not (a_log.dtype in allowed and dt_bias.dtype in allowed):
        raise UnsupportedDtype(
            f"delta_gates: a is {a.dtype}, b {b.dtype}, a_log {a_log.dtype} and dt_bias "
            f"{dt_bias.dtype}; one dtype is needed, or float32 for the last two"
        )
    chosen = choose("delta_gates", backend, a, b, a_log, dt_bias)
    return call(_delta_gates, *(x.contiguous() for x in (a, b, a_log, dt_bias)), chosen)
