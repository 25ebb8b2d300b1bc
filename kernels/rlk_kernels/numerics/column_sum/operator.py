"""Sums over rows, for gradients of weights and biases: fixed blocks, fixed order, no atomics.

    s[h] = sum over blocks of 128 rows ( sum over blocks of 128 of those ( ... x[row, h] ) )

BLOCK_ROWS consecutive rows are added in one fixed order in fp32, then BLOCK_ROWS consecutive
block sums, and so on until one sum remains. Rows of zeros after the last row change nothing.

M = rows   H = columns
"""

import torch
from torch import Tensor

from rlk_kernels.custom_op import call, custom_op
from rlk_kernels.numerics.column_sum import portable
from rlk_kernels.numerics.dtypes import wide_dtype


@custom_op(
    "column_sum",
    lambda x, backend: x.new_empty(x.shape[1], dtype=wide_dtype(x.dtype)),
    no_gradient=("column_sum", "it has no gradient"),
)
def _column_sum(x: Tensor, backend: str) -> Tensor:
    wide = wide_dtype(x.dtype)
    if x.shape[0] == 0:
        return torch.zeros(x.shape[1], dtype=wide, device=x.device)
    if backend == "torch":
        sum_blocks = portable.sum_blocks
    else:
        from rlk_kernels.numerics.column_sum import kernels

        sum_blocks = kernels.sum_blocks
    total = x.contiguous()
    while total.shape[0] > 1 or total.dtype != wide:
        total = sum_blocks(total)
    # A custom operator must not return the memory of its argument.
    return total[0].clone() if total is x else total[0]


def column_sum(x: Tensor, backend: str) -> Tensor:
    """[M, H] -> [H] in fp32 (float64 for float64)."""
    return call(_column_sum, x, backend)
