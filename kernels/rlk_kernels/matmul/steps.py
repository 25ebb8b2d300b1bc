"""Steps that the kernels of a product share: where a tile lies, and split accumulation."""

import triton
import triton.language as tl


@triton.jit
def _tile_position(tile, M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Row tile and column tile of the `tile`-th output tile, some GROUP row tiles at a time: groups
    of one size, for one row tile alone would read all columns again."""
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
    """Whether a segment but the first begins at product k."""
    return (k % SEGMENT == 0) & (k > 0) & (k <= last)


@triton.jit
def carry_high(low, high):
    """(low, high) for the next segment."""
    s = low + high
    high = (s.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return s - high, high
