"""The Triton kernel of `column_sum`: a program adds BLOCK_ROWS rows of 32 columns."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.launching import cdiv, launch, shape_cache
from rlk_kernels.memory import empty
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
    out = empty((cdiv(m, BLOCK_ROWS), h), torch.float32, x.device)
    if out.numel():
        launch(
            shape_cache("column_sum", h, x.dtype), _sum_rows_kernel,
            (out.shape[0], cdiv(h, 32), 1), (x, out, m, h, BLOCK_ROWS, 32), {"num_warps": 4},
        )  # fmt: skip
    return out
