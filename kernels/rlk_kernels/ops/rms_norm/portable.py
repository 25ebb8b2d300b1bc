"""`rms_norm` in PyTorch: sums by halves, in float64."""

import torch
from torch import Tensor

from rlk_kernels.numerics.column_sum.operator import column_sum
from rlk_kernels.numerics.dtypes import wide_dtype
from rlk_kernels.numerics.rows import by_rows, tree_sum


def _inverse_rms(s: Tensor, eps: float) -> Tensor:
    return 1.0 / (tree_sum(s.double().square()) / s.shape[-1] + eps).sqrt()


def _factor(weight: Tensor, one_plus: bool, wide: torch.dtype) -> Tensor:
    """What a norm multiplies by."""
    return weight.to(wide) + 1.0 if one_plus else weight.to(wide)


def _forward(x, residual, factor, eps, hf):
    wide = wide_dtype(x.dtype)
    s = x if residual is None else (x.to(wide) + residual.to(wide)).to(x.dtype)
    n = s.to(wide) * _inverse_rms(s, eps).to(wide)
    if hf:
        n = n.to(x.dtype).to(wide)
    y = (n * factor).to(x.dtype)
    return y, s


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, hf: bool, one_plus: bool
) -> tuple[Tensor, Tensor]:
    """y and s = x + residual of x[M, H]; without a residual s is empty, and x may be [..., H]."""
    rows, factor = x.reshape(-1, x.shape[-1]), _factor(weight, one_plus, wide_dtype(x.dtype))
    y, s = by_rows(lambda a, b: _forward(a, b, factor, eps, hf), rows, residual)
    return y.view(x.shape), (x.new_empty(0) if residual is None else s)


def backward(
    s: Tensor, weight: Tensor, dy: Tensor, dnew: Tensor | None, eps: float, one_plus: bool
) -> tuple[Tensor, Tensor]:
    """(ds, dweight)."""
    wide = wide_dtype(s.dtype)
    r = _inverse_rms(s, eps)
    n = s.double() * r
    g = dy.double() * _factor(weight, one_plus, wide).double()
    ds = r * (g - n * (tree_sum(g * n) / s.shape[-1]))
    if dnew is not None:
        ds = ds + dnew.double()
    return ds.to(wide).to(s.dtype), column_sum((dy.double() * n).to(wide), "torch")
