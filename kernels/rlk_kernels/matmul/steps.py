"""Steps that the kernels share: the position of a tile and split accumulation."""

import triton
import triton.language as tl


@triton.jit
def tile_position(tile, M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Row and column of the `tile`-th output tile, about GROUP row tiles at a time. All groups have
    about the same size, because a group of one row tile would read all columns again."""
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    group = tl.cdiv(tiles_m, tl.maximum((tiles_m + GROUP // 2) // GROUP, 1))
    per_group = group * tiles_n
    first = (tile // per_group) * group
    size = tl.minimum(tiles_m - first, group)
    within = tile % per_group
    return first + within % size, within // size


@triton.jit
def begins_segment(k, SEGMENT: tl.constexpr, last):
    """Whether a segment other than the first begins at product k."""
    return (k % SEGMENT == 0) & (k > 0) & (k <= last)


@triton.jit
def carry_high(low, high):
    """(low, high) for the next segment."""
    s = low + high
    high = (s.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return s - high, high
