"""What the Triton kernels of the gated delta rule share: where rows lie, norms, and the steps of a
chunk whose order decides bits.

Sums of a norm go by halves: each addition has two operands, so that no layout of threads can change
the order. What a compiler could fuse in two ways is written as `tl.fma`; the launches switch other
fusions off.
"""

import triton
import triton.language as tl

BLOCK = tl.constexpr(16)
"""Rows of a block of a chunk. It is part of the order of the sums."""
TOGETHER = tl.constexpr(4)
"""Rows of a block whose u are computed before the rest of the block reads them. No bit depends on
it."""


@triton.jit
def sum_columns(x, ROWS: tl.constexpr, COLS: tl.constexpr, LEVELS: tl.constexpr):
    """[ROWS, COLS] -> [ROWS], for COLS = 2**LEVELS."""
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (ROWS, 2, COLS >> (level + 1))), 1)
    return tl.reshape(x, (ROWS,))


@triton.jit
def normed(x, scale, eps, ROWS: tl.constexpr, COLS: tl.constexpr, LEVELS: tl.constexpr):
    """x[ROWS, COLS] * scale / sqrt(sum of squares + eps), in fp32."""
    x = x.to(tl.float32)
    square = sum_columns(x * x, ROWS, COLS, LEVELS)
    return x * (tl.rsqrt(square + eps) * scale)[:, None]


@triton.jit
def find_chunk(cu_ptr, chunk, B, C: tl.constexpr, SPARE: tl.constexpr):
    """(sequence b, the number of `chunk` in it). The chunks of b begin at cu[b] // C + b * SPARE,
    which gives every sequence as many as it needs: with SPARE = 2 also for rows that continue a
    chunk. Of other chunks the number is negative, or beyond those of b."""
    low = 0
    high = B
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_ptr + middle) // C + middle * SPARE <= chunk:
            low = middle
        else:
            high = middle
    return low, chunk - (tl.load(cu_ptr + low) // C + low * SPARE)


@triton.jit
def find_rows(b, cu_ptr, slots_ptr, context_ptr, N, CACHED: tl.constexpr):
    """(the first new row of sequence b, the row after the last, the tokens before, the slot); there
    are no rows where the slot is outside of the cache."""
    begin = tl.load(cu_ptr + b)
    end = tl.load(cu_ptr + b + 1)
    context = begin - begin
    slot = tl.zeros((), tl.int64)
    if CACHED:
        context = tl.load(context_ptr + b)
        slot = tl.load(slots_ptr + b).to(tl.int64)
        if (slot < 0) | (slot >= N):
            end = begin
            slot = slot * 0
    return begin, end, context, slot


@triton.jit
def part_of(x, part: tl.constexpr, dtype):
    """Part 0, 1, ... of x: numbers of `dtype` whose sum is x, or close to it."""
    piece = x.to(dtype)
    for _ in tl.static_range(part):
        x = x - piece.to(tl.float32)
        piece = x.to(dtype)
    return piece


@triton.jit
def picked(x, here, axis: tl.constexpr):
    """The numbers of fp32 x where `here`, at one place of the axis, is true. The sum is of whole
    numbers, because a compiler may leave out the zeros of these."""
    bits = tl.where(here, x.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits, axis).to(tl.float32, bitcast=True)


@triton.jit
def solve_block(r, below_ptr, C: tl.constexpr, dtype):
    """u[BE, BLOCK], rounded, of r[BE, BLOCK]: u_i = round(r_i - sum_{j<i} below_ij u_j), from front
    to back by multiply-adds; below[j, i] lies transposed, with zeros for j >= i. A zero is +0."""
    i = tl.arange(0, BLOCK)
    u = r
    for first in tl.static_range(0, BLOCK, TOGETHER):
        some = ()
        for one in tl.static_range(TOGETHER):
            here = i[None, :] == first + one
            x = picked(r, here, 1)
            for before in tl.static_range(one):
                factor = tl.load(below_ptr + (first + before) * C + first + one)
                x = tl.fma(0.0 - factor, some[before], x)
            x = x.to(dtype).to(tl.float32)
            some = some + (x,)  # noqa: RUF005 (Triton has no other way)
            u = tl.where(here, (x + 0.0)[:, None], u)
        if first + TOGETHER < BLOCK:
            for one in tl.static_range(TOGETHER):
                factors = 0.0 - tl.load(below_ptr + (first + one) * C + i)
                wide = tl.broadcast_to(some[one][:, None], r.shape)
                r = tl.fma(tl.broadcast_to(factors[None, :], r.shape), wide, r)
    return u
