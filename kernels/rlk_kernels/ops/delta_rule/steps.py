"""Sums that the Triton kernels of the gated delta rule share. They go by halves: each addition has
two operands, so that no layout of threads can change the order."""

import triton
import triton.language as tl


@triton.jit
def sum_rows(x, ROWS: tl.constexpr, COLS: tl.constexpr, LEVELS: tl.constexpr):
    """[ROWS, COLS] -> [COLS], for ROWS = 2**LEVELS."""
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (2, ROWS >> (level + 1), COLS)), 0)
    return tl.reshape(x, (COLS,))


@triton.jit
def sum_columns(x, ROWS: tl.constexpr, COLS: tl.constexpr, LEVELS: tl.constexpr):
    """[ROWS, COLS] -> [ROWS], for COLS = 2**LEVELS."""
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (ROWS, 2, COLS >> (level + 1))), 1)
    return tl.reshape(x, (ROWS,))
