"""`softcap` in PyTorch: elementwise, in float64."""

import torch
from torch import Tensor

from rlk_kernels.numerics import elementary
from rlk_kernels.numerics.rows import by_rows


def capped(x: Tensor, cap: float) -> Tensor:
    """cap tanh(x / cap) in float64."""
    t = elementary.exp(x.double().abs() * (-2.0 / cap))
    return torch.where(x < 0, -cap, cap) * ((1 - t) / (1 + t))


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def forward(x: Tensor, cap: float) -> Tensor:
    """y of x[M, F]."""
    return by_rows(lambda rows: capped(rows, cap).to(_wide(x)).to(x.dtype), x)


def backward(y: Tensor, dy: Tensor, cap: float) -> Tensor:
    """dx."""

    def slope(y: Tensor, dy: Tensor) -> Tensor:
        return (dy.double() * (1.0 - (y.double() / cap).square())).to(_wide(y)).to(y.dtype)

    return by_rows(slope, y, dy)
