"""The norm of gradients, computed by rows: the rank of a row adds up its squares, and the sums of
rows are added up in the order of the whole parameter, so that the norm does not depend on the
ranks."""

from collections.abc import Iterable

import torch
from torch import Tensor

from rlk_kernels.numerics.rows import tree_sum

BLOCK = 1 << 24
"""The number of elements that are widened at a time."""


def row_squares(grad: Tensor) -> Tensor:
    """float64 [rows]: the sum of squares of each row."""
    rows = grad.flatten(1) if grad.dim() > 1 else grad.reshape(-1, 1)
    step = max(1, BLOCK // max(1, rows.shape[1]))
    return torch.cat([tree_sum(some.double() ** 2).squeeze(-1) for some in rows.split(step)])


def norm_of(sums: Iterable[Tensor]) -> Tensor:
    """The 2-norm, float64, from `row_squares` of each whole parameter."""
    squares = torch.cat([tree_sum(rows) for rows in sums])
    return tree_sum(squares).squeeze(-1).sqrt()
