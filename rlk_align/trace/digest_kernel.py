"""The first pass of `digest.digest_parameters` on a GPU: the digests of all rows of parameters of
one shape, in one launch that reads every element once and allocates only its results.

The formula and the bits are those of `digest.py`, since sums modulo 2^64 do not depend on order.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

_ROWS, _LANES = 8, 256
"""The rows and lanes that a program has in registers at a time."""


@triton.jit
def _rows_kernel(  # type: ignore[no-untyped-def]
    address_ptr, out_ptr, table_ptr, rows, width, lanes,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    parameter = tl.program_id(1)
    weight_ptr = tl.load(address_ptr + parameter).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        weight_ptr = tl.multiple_of(weight_ptr, 16)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = tl.zeros((ROWS,), tl.int64)
    second = tl.zeros((ROWS,), tl.int64)
    for begin in range(0, lanes, LANES):
        column = begin * 2 + tl.arange(0, 2 * LANES)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        x = tl.load(weight_ptr + row[:, None] * width + column[None, :], mask=inside, other=0.0)
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        bits = tl.where((bits & 0x7FFFFFFF) == 0, 0, bits)  # -0 becomes +0
        low, high = tl.split(tl.reshape(bits, (ROWS, LANES, 2)))
        lane = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
        number = begin + tl.arange(0, LANES)
        exists = number < lanes
        # Beyond the last lane b and c are 0.
        a = tl.load(table_ptr + number, mask=exists, other=0)[None, :]
        b = tl.load(table_ptr + lanes + number, mask=exists, other=0)[None, :]
        c = tl.load(table_ptr + 2 * lanes + number, mask=exists, other=0)[None, :]
        z = (lane + 1) * a
        z = z ^ ((z >> 32) & 0xFFFFFFFF)
        first += tl.sum(z * b, 1)
        second += tl.sum(z * c, 1)
    at = out_ptr + (parameter.to(tl.int64) * rows + row) * 2
    tl.store(at, first, mask=row < rows)
    tl.store(at + 1, second, mask=row < rows)


def row_digests(weights: Sequence[torch.Tensor], table: torch.Tensor) -> torch.Tensor:
    """`digest.digest_rows` of the rows of n matrices `[rows, width]` of one shape, dtype (bfloat16,
    float16 or float32) and device, widened to float32, with -0 as +0: int64 `[n * rows, 2]`.

    `table`: the coefficients of the lanes, int64 `[3, ceil(width / 2)]`.
    """
    dense = [weight.contiguous() for weight in weights]
    rows, width = dense[0].shape
    pointers = tuple(weight.data_ptr() for weight in dense)
    out = torch.empty(len(dense) * rows, 2, dtype=torch.int64, device=table.device)
    aligned = all(pointer % 16 == 0 for pointer in pointers)
    dtype = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
    _rows_kernel[(triton.cdiv(rows, _ROWS), len(dense))](
        _addresses(pointers, table.device), out, table, rows, width, table.shape[1],
        dtype[dense[0].dtype], aligned, _ROWS, _LANES,
    )  # fmt: skip
    return out


@lru_cache(maxsize=64)
def _addresses(pointers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The pointers, int64 `[n]`; cached, because a copy to a GPU waits for it."""
    return torch.tensor(pointers, dtype=torch.int64, device=device)
