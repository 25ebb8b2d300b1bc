"""`clamped_swiglu` in PyTorch: elementwise, in float64."""

import torch
from torch import Tensor

from rlk_kernels.numerics.dtypes import wide_dtype
from rlk_kernels.numerics.elementary import sigmoid
from rlk_kernels.numerics.rows import by_rows


def forward(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """y of gate[M, F] and up[M, F]."""

    def rows(gate: Tensor, up: Tensor) -> Tensor:
        g, u = gate.double().clamp(max=limit), up.double().clamp(-limit, limit)
        return (g * sigmoid(alpha * g) * (u + 1.0)).to(wide_dtype(gate.dtype)).to(gate.dtype)

    return by_rows(rows, gate, up)


def backward(
    gate: Tensor, up: Tensor, dy: Tensor, alpha: float, limit: float
) -> tuple[Tensor, Tensor]:
    """(dgate, dup)."""

    def rows(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        g, u, d = gate.double().clamp(max=limit), up.double().clamp(-limit, limit), dy.double()
        s = sigmoid(alpha * g)
        dg = torch.where(gate > limit, 0.0, d * (u + 1.0) * s * (1.0 + alpha * g * (1.0 - s)))
        du = torch.where(up.abs() > limit, 0.0, d * g * s)
        return tuple(x.to(wide_dtype(gate.dtype)).to(gate.dtype) for x in (dg, du))

    return by_rows(rows, gate, up, dy)
