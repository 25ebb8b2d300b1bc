"""`swiglu` in PyTorch: elementwise, in float64."""

from torch import Tensor

from rlk_kernels.numerics.dtypes import wide_dtype
from rlk_kernels.numerics.elementary import sigmoid
from rlk_kernels.numerics.rows import by_rows

GELU_TANH, SIGMOID = 1, 2
"""The numbers of activations; 0 is silu."""
GELU, CUBE = 1.5957691216057308, 0.044715
"""2 sqrt(2 / pi), and the factor of gate^3 in gelu's tanh form."""


def _share(g: Tensor, kind: int) -> Tensor:
    """The share of gate that passes: 1 / (1 + exp(-z))."""
    return sigmoid(GELU * (g + CUBE * (g * g * g)) if kind == GELU_TANH else g)


def _forward(gate: Tensor, up: Tensor, kind: int) -> Tensor:
    wide = wide_dtype(gate.dtype)
    g = gate.double()
    factor = _share(g, kind) if kind == SIGMOID else g * _share(g, kind)
    return (factor * up.double()).to(wide).to(gate.dtype)


def _backward(gate: Tensor, up: Tensor, dy: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    wide = wide_dtype(gate.dtype)
    g, d = gate.double(), dy.double()
    s = _share(g, kind)
    if kind == SIGMOID:
        dg = d * up.double() * s * (1.0 - s)
        return dg.to(wide).to(gate.dtype), (d * s).to(wide).to(gate.dtype)
    slope = g * (1.0 - s)
    if kind == GELU_TANH:
        slope = slope * (GELU * (1.0 + 3 * CUBE * (g * g)))
    dg = d * up.double() * s * (1.0 + slope)
    return dg.to(wide).to(gate.dtype), (d * g * s).to(wide).to(gate.dtype)


def forward(gate: Tensor, up: Tensor, kind: int = 0) -> Tensor:
    """y of gate[M, F] and up[M, F]."""
    return by_rows(lambda g, u: _forward(g, u, kind), gate, up)


def backward(gate: Tensor, up: Tensor, dy: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    """(dgate, dup)."""
    return by_rows(lambda g, u, d: _backward(g, u, d, kind), gate, up, dy)
