"""`combine_experts` in PyTorch: products and sums are rounded one by one, by IEEE rules."""

import torch
from torch import Tensor

from rlk_kernels.numerics.dtypes import wide_dtype
from rlk_kernels.numerics.rows import by_rows, tree_sum


def _taken(ids: Tensor, experts: int) -> Tensor:
    return (ids >= 0) & (ids < experts)


def forward(rows: Tensor, weights: Tensor | None, ids: Tensor | None, experts: int) -> Tensor:
    """y[T, H]; without weights and ids, the plain sum."""
    wide = wide_dtype(rows.dtype)
    total = torch.zeros(rows.shape[0], rows.shape[2], dtype=wide, device=rows.device)
    taken = None if ids is None else _taken(ids, experts)
    for j in range(rows.shape[1]):
        term = rows[:, j].to(wide)
        if weights is not None:
            term = term * weights[:, j : j + 1]
        if taken is not None:
            term = torch.where(taken[:, j : j + 1], term, 0.0)
        total = total + term
    return total.to(rows.dtype)


def _backward(dy: Tensor, rows: Tensor, weights: Tensor, taken: Tensor) -> tuple[Tensor, Tensor]:
    d = dy.double()[:, None]
    keep = taken[..., None]
    drows = torch.where(keep, d.to(weights.dtype) * weights[..., None], 0.0)
    products = torch.where(keep, d * rows.double(), 0.0)
    return drows.to(rows.dtype), tree_sum(products).squeeze(-1).to(weights.dtype)


def backward(
    dy: Tensor, rows: Tensor, weights: Tensor, ids: Tensor, experts: int
) -> tuple[Tensor, Tensor]:
    """(drows, dweights)."""
    return by_rows(_backward, dy, rows, weights, _taken(ids, experts))
