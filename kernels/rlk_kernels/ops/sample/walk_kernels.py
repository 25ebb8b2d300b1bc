"""The walk of `sample` down the log-sum-exp tree in Triton, and the parts that its kernels share.

A walk is computed from the leaves up: each node holds the column that a walk would reach from it,
and its parent takes over one of two. Only the root's column is drawn, so the nodes of a level may
share one number.
"""

import triton
import triton.language as tl

from rlk_kernels.numerics.lse_tree.kernels import (
    LEAF_COLUMNS,
    LN2,
    NO_COLUMNS,
    merge_neighbours,
    nearest_exponent,
    pow2,
    scaled,
)
from rlk_kernels.ops.sample import draws

DRAWS = tl.constexpr(draws.DRAWS)
HEIGHTS = tl.constexpr(32)
LEAF_LEVELS = tl.constexpr(4)
MASS = tl.constexpr(1099511627776.0)
"""2**40."""


@triton.jit
def divided(x, temperature):
    """z of x at a row's temperature, where 0 counts as 1."""
    z = x
    if (temperature != 1.0) & (temperature != 0.0):
        z = tl.div_rn(x, tl.zeros_like(x) + temperature)
    return z


@triton.jit
def is_kept(x, column, cut, cut_column):
    """Whether a column is among those up to (cut, cut_column) in the order of `sample`. A NaN is,
    so that it reaches the sums."""
    return (x > cut) | ((x == cut) & (column <= cut_column)) | (x != x)


@triton.jit
def uniforms(key, position):
    """u[HEIGHTS] of a row, in float64."""
    height = tl.arange(0, HEIGHTS)
    low, high = position & 0xFFFFFFFF, (position >> 32) & 0xFFFFFFFF
    nothing = tl.zeros((HEIGHTS,), tl.int64)
    a, b, c, d = tl.philox(
        key, (nothing + low).to(tl.uint32), (nothing + high).to(tl.uint32),
        (height // 4).to(tl.uint32), (nothing + DRAWS).to(tl.uint32),
    )  # fmt: skip
    even, odd = tl.where(height % 4 == 0, a, c), tl.where(height % 4 == 1, b, d)
    word = tl.where(height % 2 == 0, even, odd)
    return (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10


@triton.jit
def _choose(left, right, a, b, u, HEIGHT: tl.constexpr):
    """(left + right, the column that the walk takes over)."""
    wide = left.to(tl.float64)
    number = tl.sum(tl.where(tl.arange(0, HEIGHTS) == HEIGHT, u, 0.0), 0)
    return left + right, tl.where(number * (wide + right.to(tl.float64)) < wide, a, b)


@triton.jit
def walk(n, s, column, u, NODES: tl.constexpr, LEVELS: tl.constexpr, HEIGHT: tl.constexpr):
    """(n, s, column)[NODES >> LEVELS] of nodes over 2**HEIGHT columns each."""
    for level in tl.static_range(LEVELS):
        n_left, n_right = tl.split(tl.reshape(n, (NODES >> (level + 1), 2)))
        s_left, s_right = tl.split(tl.reshape(s, (NODES >> (level + 1), 2)))
        a, b = tl.split(tl.reshape(column, (NODES >> (level + 1), 2)))
        n = tl.maximum(n_left, n_right)
        s_left, s_right = s_left * pow2(n_left - n), s_right * pow2(n_right - n)
        s, column = _choose(s_left, s_right, a, b, u, HEIGHT + level)
    return n, s, column


@triton.jit
def walk_leaves(z, column, u, LEAVES: tl.constexpr):
    """(n, s, column)[LEAVES] of z[LEAVES * LEAF]."""
    z = tl.reshape(z, (LEAVES, LEAF_COLUMNS))
    n = nearest_exponent(tl.max(z, 1))
    s = tl.exp2(scaled(z, n[:, None]))
    column = tl.reshape(column, (LEAVES, LEAF_COLUMNS))
    for level in tl.static_range(LEAF_LEVELS):
        left, right = tl.split(tl.reshape(s, (LEAVES, 8 >> level, 2)))
        a, b = tl.split(tl.reshape(column, (LEAVES, 8 >> level, 2)))
        s, column = _choose(left, right, a, b, u, level)
    return n, tl.reshape(s, (LEAVES,)), tl.reshape(column, (LEAVES,))


@triton.jit
def store_row(
    row, id, x, temperature, n, s, kept, mass, raw_ptr, nodes, ids_ptr, logprobs_ptr, kept_ptr,
    mass_ptr, raw_logprobs_ptr, ROW_LEVELS: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """The results of a row from its root (n, s), the drawn column `id` and the logit x of it. A row
    without a distribution has the id -1. raw_ptr: the nodes at temperature 1."""
    exists = s > 0.0  # a NaN is not
    greedy = temperature == 0.0
    nothing = float("nan")
    z = divided(x + tl.zeros((1,), tl.float32), temperature)
    logprob = tl.where(greedy, 0.0, (scaled(z, n) - tl.log2(s)) * LN2)
    here = row + tl.zeros((1,), tl.int64)
    tl.store(logprobs_ptr + here, tl.where(exists, logprob, nothing))
    tl.store(mass_ptr + row, tl.where(exists, mass, nothing))
    tl.store(kept_ptr + row, tl.where(exists, tl.where(greedy, 1, kept), 0))
    tl.store(ids_ptr + row, tl.where(exists, id, -1).to(tl.int64))
    if RAW:
        block = tl.arange(0, 1 << ROW_LEVELS)[None, :]
        at = raw_ptr + (row * nodes + block) * 2
        n = tl.load(at, mask=block < nodes, other=NO_COLUMNS)
        s = tl.load(at + 1, mask=block < nodes, other=0.0)
        n, s, _ = merge_neighbours(n, s, s, 1, 1 << ROW_LEVELS, ROW_LEVELS, False)
        raw = (
            scaled(x + tl.zeros((1,), tl.float32), tl.reshape(n, (1,)))
            - tl.log2(tl.reshape(s, (1,)))
        ) * LN2
        tl.store(raw_logprobs_ptr + here, tl.where(exists, raw, nothing))
