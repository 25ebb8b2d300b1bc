"""The norm of gradients, by rows: a whole row's squares are added up where it lies, and the rows'
sums in the order of the whole parameter, so that it does not depend on who holds which rows."""

from collections.abc import Iterable

import torch
from torch import Tensor

from rlk_kernels.numerics.rows import tree_sum

BLOCK = 1 << 24
"""Elements that are widened at a time."""


def row_squares(grad: Tensor) -> Tensor:
    """float64 [rows]: the sum of squares of each row."""
    rows = grad.flatten(1) if grad.dim() > 1 else grad.reshape(-1, 1)
    step = max(1, BLOCK // max(1, rows.shape[1]))
    return torch.cat([tree_sum(some.double() ** 2).squeeze(-1) for some in rows.split(step)])


def norm_of(sums: Iterable[Tensor]) -> Tensor:
    """The 2-norm, float64, of `row_squares` of each parameter, whole."""
    squares = torch.cat([tree_sum(rows) for rows in sums])
    return tree_sum(squares).squeeze(-1).sqrt()
