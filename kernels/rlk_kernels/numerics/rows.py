"""Functions of single rows for the portable backend: sums by halves, and blocks of rows."""

import torch
from torch import Tensor


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension by halves (element i with element i + ceil(n/2)), keepdim.

    The order is a function of the dimension's size alone; each addition is one IEEE rounding.
    """
    x = x.clone()
    n = x.shape[-1]
    if n == 0:
        return x.new_zeros(*x.shape[:-1], 1)
    while n > 1:
        half = (n + 1) // 2
        x[..., : n - half] += x[..., half:n]
        n = half
    return x[..., :1]


BLOCK = 1 << 15
"""The most elements of a block of `by_rows`: they fit a core's cache, and torch does not split
them."""


def by_rows(run, *rows: Tensor):
    """`run(*rows)` by blocks of rows, with the results concatenated: faster, with the same bits.

    `run` maps [m, ...] tensors (and None) to one tensor or a tuple of tensors with m rows.
    """
    m, width = rows[0].shape[0], max(1, rows[0][:1].numel())
    step = max(1, BLOCK // width)
    if m <= step:
        return run(*rows)
    parts = [
        run(*(None if x is None else x[i : i + step] for x in rows)) for i in range(0, m, step)
    ]
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))
