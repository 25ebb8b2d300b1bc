"""`softcap` in PyTorch: elementwise, in float64."""

import torch
from torch import Tensor

from rlk_kernels.numerics import elementary
from rlk_kernels.numerics.dtypes import wide_dtype
from rlk_kernels.numerics.rows import by_rows


def capped(x: Tensor, cap: float) -> Tensor:
    """cap tanh(x / cap) in float64."""
    t = elementary.exp(x.double().abs() * (-2.0 / cap))
    return torch.where(x < 0, -cap, cap) * ((1 - t) / (1 + t))


def forward(x: Tensor, cap: float) -> Tensor:
    """y of x[M, F]."""
    return by_rows(lambda rows: capped(rows, cap).to(wide_dtype(x.dtype)).to(x.dtype), x)


def backward(y: Tensor, dy: Tensor, cap: float) -> Tensor:
    """dx."""

    def slope(y: Tensor, dy: Tensor) -> Tensor:
        dx = dy.double() * (1.0 - (y.double() / cap).square())
        return dx.to(wide_dtype(y.dtype)).to(y.dtype)

    return by_rows(slope, y, dy)
