"""`activation` in PyTorch: elementwise, in float64."""

from torch import Tensor

from rlk_kernels.numerics.dtypes import wide_dtype
from rlk_kernels.numerics.elementary import sigmoid
from rlk_kernels.numerics.rows import by_rows
from rlk_kernels.ops.swiglu.portable import CUBE, GELU


def forward(x: Tensor, gelu: bool) -> Tensor:
    """y of x[M, F]."""

    def rows(part: Tensor) -> Tensor:
        g = part.double()
        y = g * sigmoid(GELU * (g + CUBE * (g * g * g))) if gelu else g.relu().square()
        return y.to(wide_dtype(x.dtype)).to(x.dtype)

    return by_rows(rows, x)


def backward(x: Tensor, dy: Tensor, gelu: bool) -> Tensor:
    """dx."""

    def rows(part: Tensor, dy: Tensor) -> Tensor:
        g, d = part.double(), dy.double()
        if gelu:
            s = sigmoid(GELU * (g + CUBE * (g * g * g)))
            slope = s * (1.0 + g * (1.0 - s) * (GELU * (1.0 + 3 * CUBE * (g * g))))
        else:
            slope = 2.0 * g.relu()
        return (d * slope).to(wide_dtype(x.dtype)).to(x.dtype)

    return by_rows(rows, x, dy)
