"""Sums over rows, for gradients of weights and biases: fixed blocks, fixed order, no atomics.

    s[h] = sum over blocks of 128 rows ( sum over blocks of 128 of those ( ... x[row, h] ) )

BLOCK_ROWS consecutive rows are added in one fixed order in fp32, then BLOCK_ROWS consecutive
block sums, and so on until one is left. Rows of zeros behind the last row change nothing.

M = rows   H = columns
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_ROWS = 128


@triton.jit(do_not_specialize=["M"])
def _sum_rows_kernel(x_ptr, out_ptr, M, H, ROWS: tl.constexpr, BH: tl.constexpr):
    cols = tl.program_id(1) * BH + tl.arange(0, BH)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = (rows[:, None] < M) & (cols[None, :] < H)
    x = tl.load(x_ptr + rows[:, None] * H + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    at = out_ptr + tl.program_id(0).to(tl.int64) * H + cols
    tl.store(at, tl.sum(x, 0), mask=cols < H)


def sum_rows_triton(x: Tensor) -> Tensor:
    """[M, H] contiguous -> [ceil(M / BLOCK_ROWS), H] in fp32."""
    m, h = x.shape
    out = torch.empty(triton.cdiv(m, BLOCK_ROWS), h, dtype=torch.float32, device=x.device)
    if out.numel():
        grid = (out.shape[0], triton.cdiv(h, 32))
        _sum_rows_kernel[grid](x, out, m, h, BLOCK_ROWS, 32, num_warps=4)
    return out


def sum_rows_portable(x: Tensor) -> Tensor:
    """[M, H] -> [ceil(M / BLOCK_ROWS), H] in fp32 (float64 for float64)."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    m, h = x.shape
    blocks = x.new_zeros((-m) % BLOCK_ROWS + m, h, dtype=wide)
    blocks[:m] = x
    blocks = blocks.view(-1, BLOCK_ROWS, h)
    total = x.new_zeros(blocks.shape[0], h, dtype=wide)
    for i in range(BLOCK_ROWS):
        total += blocks[:, i]
    return total


@torch.library.custom_op("rlk::column_sum", mutates_args=())
def column_sum(x: Tensor, backend: str) -> Tensor:
    """[M, H] -> [H] in fp32 (float64 for float64)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if x.shape[0] == 0:
        return torch.zeros(x.shape[1], dtype=wide, device=x.device)
    total = x.contiguous()
    while total.shape[0] > 1 or total.dtype != wide:
        total = sum_rows_portable(total) if backend == "torch" else sum_rows_triton(total)
    return total[0].clone()


@column_sum.register_fake
def _(x, backend):
    return x.new_empty(x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
