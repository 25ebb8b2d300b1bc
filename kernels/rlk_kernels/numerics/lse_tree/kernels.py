"""The tree of `tree.py` in Triton: leaves, and merges of neighbours."""

import triton
import triton.language as tl

from rlk_kernels.numerics.lse_tree.tree import LEAF, NOTHING

LEAF_COLUMNS = tl.constexpr(LEAF)
NO_COLUMNS = tl.constexpr(NOTHING)
LOG2E = tl.constexpr(1.4426950216293335)
LOG2E_REST = tl.constexpr(1.925963033500e-08)
"""log2(e) as the sum of two fp32 numbers, so that z log2(e) - n keeps its digits where all z have a
large common offset."""
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def scaled(z, n):
    """z log2(e) - n, where each of the two steps is rounded once."""
    return tl.fma(z, LOG2E_REST, tl.fma(z, LOG2E, -n))


@triton.jit
def pow2(k):
    """2**k for integers k <= 0 in fp32; 0 for k <= -127."""
    shifted = tl.maximum(k, -127.0) + 12583039.0  # 1.5 * 2**23 + 127: k + 127 in the low bits
    return (shifted.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)


@triton.jit
def nearest_exponent(x):
    """The integer nearest to x log2(e), at least NO_COLUMNS."""
    near = tl.fma(x, LOG2E, 12582912.0) - 12582912.0
    large = x * LOG2E
    return tl.maximum(tl.where(tl.abs(large) < 8388608.0, near, large), NO_COLUMNS)


@triton.jit
def _sum_leaf(e, ROWS: tl.constexpr, LEAVES: tl.constexpr):
    e = tl.reshape(e, (ROWS, LEAVES, 2, 2, 2, 2))
    return tl.sum(tl.sum(tl.sum(tl.sum(e, 5), 4), 3), 2)


@triton.jit
def leaf_stats(z, ROWS: tl.constexpr, LEAVES: tl.constexpr, ENTROPY: tl.constexpr):
    """(n, s, u)[ROWS, LEAVES] and e[ROWS, LEAVES, LEAF] of z[ROWS, LEAVES * LEAF]."""
    z = tl.reshape(z, (ROWS, LEAVES, LEAF_COLUMNS))
    n = nearest_exponent(tl.max(z, 2))
    y = scaled(z, n[:, :, None])
    e = tl.exp2(y)
    s = _sum_leaf(e, ROWS, LEAVES)
    u = s
    if ENTROPY:
        u = _sum_leaf(tl.where(e > 0.0, e * y, 0.0), ROWS, LEAVES)
    return n, s, u, e


@triton.jit
def leaf_stats_of_halves(left, right, LEAVES: tl.constexpr):
    """(n, s)[1, LEAVES] of leaves in two halves of 8 columns, [LEAVES, 8] each."""
    n = nearest_exponent(tl.maximum(tl.max(left, 1), tl.max(right, 1)))
    e = tl.reshape(tl.exp2(scaled(left, n[:, None])), (LEAVES, 2, 2, 2))
    s = tl.sum(tl.sum(tl.sum(e, 3), 2), 1)
    e = tl.reshape(tl.exp2(scaled(right, n[:, None])), (LEAVES, 2, 2, 2))
    s += tl.sum(tl.sum(tl.sum(e, 3), 2), 1)
    return tl.reshape(n, (1, LEAVES)), tl.reshape(s, (1, LEAVES))


@triton.jit
def merge_neighbours(
    n, s, u, ROWS: tl.constexpr, NODES: tl.constexpr, LEVELS: tl.constexpr, ENTROPY: tl.constexpr
):
    """(n, s, u)[ROWS, NODES] -> [ROWS, NODES >> LEVELS]."""
    for level in tl.static_range(LEVELS):
        n = tl.reshape(n, (ROWS, NODES >> (level + 1), 2))
        s = tl.reshape(s, (ROWS, NODES >> (level + 1), 2))
        u = tl.reshape(u, (ROWS, NODES >> (level + 1), 2))
        top = tl.max(n, 2)
        k = n - top[:, :, None]
        f = pow2(k)
        if ENTROPY:
            u = tl.sum(f * tl.fma(s, tl.maximum(k, -127.0), u), 2)
        s = tl.sum(s * f, 2)
        n = top
        if not ENTROPY:
            u = s
    return n, s, u
