"""`swiglu` in PyTorch: elementwise, in float64."""

import torch
from torch import Tensor

from rlk_kernels.numerics.elementary import sigmoid
from rlk_kernels.numerics.rows import by_rows


def _forward(gate: Tensor, up: Tensor) -> Tensor:
    wide = torch.float64 if gate.dtype == torch.float64 else torch.float32
    g = gate.double()
    return (g * sigmoid(g) * up.double()).to(wide).to(gate.dtype)


def _backward(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if gate.dtype == torch.float64 else torch.float32
    g, d = gate.double(), dy.double()
    s = sigmoid(g)
    dg = d * up.double() * s * (1.0 + g * (1.0 - s))
    return dg.to(wide).to(gate.dtype), (d * g * s).to(wide).to(gate.dtype)


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """y of gate[M, F] and up[M, F]."""
    return by_rows(_forward, gate, up)


def backward(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """(dgate, dup)."""
    return by_rows(_backward, gate, up, dy)
