"""`layer_norm` in PyTorch: sums by halves, in float64."""

from torch import Tensor

from rlk_kernels.numerics.column_sum.operator import column_sum
from rlk_kernels.numerics.dtypes import wide_dtype
from rlk_kernels.numerics.rows import by_rows, tree_sum


def _normed(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(n, r) of x[m, H] in float64."""
    wide, h = x.double(), x.shape[-1]
    c = wide - tree_sum(wide) / h
    r = 1.0 / (tree_sum(c.square()) / h + eps).sqrt()
    return c * r, r


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """y of x[M, H]."""

    def rows(x: Tensor) -> Tensor:
        y = _normed(x, eps)[0] * weight.double()
        return (y if bias is None else y + bias.double()).to(wide_dtype(x.dtype)).to(x.dtype)

    return by_rows(rows, x)


def backward(x: Tensor, weight: Tensor, dy: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias), the last two wide."""
    wide, h = wide_dtype(x.dtype), x.shape[-1]
    n, r = _normed(x, eps)
    d = dy.double()
    g = d * weight.double()
    dx = r * (g - tree_sum(g) / h - n * (tree_sum(g * n) / h))
    dw, db = (column_sum(part.to(wide), "torch") for part in (d * n, d))
    return dx.to(wide).to(x.dtype), dw, db
