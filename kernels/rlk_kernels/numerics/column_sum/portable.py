"""`column_sum` in PyTorch: the rows of a block are added one by one."""

from torch import Tensor

from rlk_kernels.numerics.dtypes import wide_dtype

BLOCK_ROWS = 128


def sum_blocks(x: Tensor) -> Tensor:
    """[M, H] -> [ceil(M / BLOCK_ROWS), H] in fp32 (float64 for float64)."""
    wide = wide_dtype(x.dtype)
    m, h = x.shape
    blocks = x.new_zeros(-(-m // BLOCK_ROWS), BLOCK_ROWS, h, dtype=wide)
    blocks.view(len(blocks) * BLOCK_ROWS, h)[:m] = x
    total = x.new_zeros(blocks.shape[0], h, dtype=wide)
    for i in range(BLOCK_ROWS):
        total += blocks[:, i]
    return total
