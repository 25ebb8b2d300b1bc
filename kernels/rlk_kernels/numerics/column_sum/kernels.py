"""The Triton kernel of `column_sum`: a program adds BLOCK_ROWS rows of 32 columns."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.numerics.column_sum.portable import BLOCK_ROWS


@triton.jit(do_not_specialize=["M"])
def _sum_rows_kernel(x_ptr, out_ptr, M, H, ROWS: tl.constexpr, BH: tl.constexpr):
    cols = tl.program_id(1) * BH + tl.arange(0, BH)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = (rows[:, None] < M) & (cols[None, :] < H)
    x = tl.load(x_ptr + rows[:, None] * H + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    at = out_ptr + tl.program_id(0).to(tl.int64) * H + cols
    tl.store(at, tl.sum(x, 0), mask=cols < H)


def sum_blocks(x: Tensor) -> Tensor:
    """[M, H] contiguous -> [ceil(M / BLOCK_ROWS), H] in fp32."""
    m, h = x.shape
    out = torch.empty(triton.cdiv(m, BLOCK_ROWS), h, dtype=torch.float32, device=x.device)
    if out.numel():
        grid = (out.shape[0], triton.cdiv(h, 32))
        _sum_rows_kernel[grid](x, out, m, h, BLOCK_ROWS, 32, num_warps=4)
    return out
