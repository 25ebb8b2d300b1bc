"""`delta_gates` in PyTorch: elementwise, in float64."""

import torch
from torch import Tensor

from rlk_kernels.numerics.column_sum.operator import column_sum
from rlk_kernels.numerics.dtypes import wide_dtype
from rlk_kernels.numerics.elementary import exp, log, sigmoid


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) in float64."""
    y = exp(-x.abs())
    # 1 + y would drop the digits of a small y.
    small = y * (1.0 - y * (1 / 2 - y * (1 / 3 - y / 4)))
    return x.clamp(min=0.0) + torch.where(y < 1e-4, small, log(1.0 + y))


def _decay(a: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """(exp(a_log), a + dt_bias) in float64."""
    return exp(a_log.double()), a.double() + dt_bias.double()


def forward(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """(g, beta)."""
    wide = wide_dtype(a.dtype)
    rate, x = _decay(a, a_log, dt_bias)
    return (-rate * softplus(x)).to(wide), sigmoid(b.double()).to(wide).to(b.dtype)


def backward(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, dg: Tensor, dbeta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(da, db, da_log and ddt_bias in fp32)."""
    wide = wide_dtype(a.dtype)
    rate, x = _decay(a, a_log, dt_bias)
    da = dg.double() * -rate * sigmoid(x)
    share = sigmoid(b.double())
    db = dbeta.double() * share * (1.0 - share)
    da_log = column_sum((dg.double() * (-rate * softplus(x))).to(wide), "torch")
    ddt = column_sum(da.to(wide), "torch")
    return da.to(wide).to(a.dtype), db.to(wide).to(b.dtype), da_log, ddt
