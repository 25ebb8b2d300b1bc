"""`gated_rms_norm` in PyTorch: sums by halves, in float64."""

from torch import Tensor

from rlk_kernels.numerics.column_sum.operator import column_sum
from rlk_kernels.numerics.dtypes import wide_dtype
from rlk_kernels.numerics.elementary import sigmoid
from rlk_kernels.numerics.rows import by_rows, tree_sum


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return 1.0 / (tree_sum(x.square()) / x.shape[-1] + eps).sqrt()


def forward(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y of x[M, H]."""

    def run(x: Tensor, gate: Tensor) -> Tensor:
        wide, z = x.double(), gate.double()
        y = wide * _inverse_rms(wide, eps) * weight.double() * (z * sigmoid(z))
        return y.to(wide_dtype(x.dtype)).to(x.dtype)

    return by_rows(run, x, gate)


def backward(
    x: Tensor, gate: Tensor, weight: Tensor, dy: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dgate, dweight in fp32)."""
    narrow = wide_dtype(x.dtype)
    wide, z, d, w = (t.double() for t in (x, gate, dy, weight))
    r, s = _inverse_rms(wide, eps), sigmoid(z)
    n, a = wide * r, z * s
    along = d * w * a
    dx = r * (along - n * (tree_sum(along * n) / x.shape[-1]))
    dgate = d * n * w * s * (1.0 + z * (1.0 - s))
    dweight = column_sum((d * n * a).to(narrow), "torch")
    return dx.to(narrow).to(x.dtype), dgate.to(narrow).to(x.dtype), dweight
