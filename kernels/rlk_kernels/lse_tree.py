"""Softmax statistics of a row of the vocabulary, in one fixed binary tree: under `logp` and
`linear_logp`, which therefore agree bit for bit.

    sum_v exp(z[v]) = s * 2**n          n an integer, s in fp32; the natural logarithm is
    log(s) + n log(2)

Leaf: LEAF aligned columns. n = max_v z[v] * log2(e), rounded to an integer; the terms
2**(z[v] log2(e) - n) are added in pairs of neighbours, then pairs of pairs, and so on.
Node: two neighbours, (n1, s1) + (n2, s2) = (n, s1 2**(n1 - n) + s2 2**(n2 - n)), n = max(n1, n2).
The scaling by powers of two is exact, so a node has one rounding, and no compiler's choice between
multiply-add and multiply, add can move it. Terms below 2**-127 of their node are dropped.

The tree depends on nothing but the column's index: a tile of the vocabulary is a whole subtree,
a missing column is neutral, and shards of any multiple of LEAF columns can be merged to the bits
of the whole. Entropy takes a third number, u = sum_v 2**y y with y = z log2(e) - n.

Portable backend: the same tree in float64, with m = max z in place of n: (m, s) stands for
s exp(m).
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels import elementary
from rlk_kernels.exact import tree_sum

LEAF = 16
"""Columns of a leaf: part of the order of the sum. Vocabularies are split in multiples of it."""
NOTHING = -(2.0**30)
"""The n of a node without columns: finite, so that no difference of two is NaN."""

LEAF_COLUMNS = tl.constexpr(LEAF)
NO_COLUMNS = tl.constexpr(NOTHING)
LOG2E = tl.constexpr(1.4426950216293335)
LOG2E_REST = tl.constexpr(1.925963033500e-08)
"""log2(e) as the sum of two fp32 numbers: z log2(e) - n keeps its digits under a common offset."""
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def scaled(z, n):
    """z log2(e) - n, each of the two steps rounded once."""
    return tl.fma(z, LOG2E_REST, tl.fma(z, LOG2E, -n))


@triton.jit
def _pow2(k):
    """2**k for integers k <= 0 held in fp32; 0 from -127 down."""
    shifted = tl.maximum(k, -127.0) + 12583039.0  # 1.5 * 2**23 + 127: k + 127 in the low bits
    return (shifted.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _to_integer(x):
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
    n = _to_integer(tl.max(z, 2))
    y = scaled(z, n[:, :, None])
    e = tl.exp2(y)
    s = _sum_leaf(e, ROWS, LEAVES)
    u = s
    if ENTROPY:
        u = _sum_leaf(tl.where(e > 0.0, e * y, 0.0), ROWS, LEAVES)
    return n, s, u, e


@triton.jit
def leaf_stats_of_halves(left, right, LEAVES: tl.constexpr):
    """(n, s)[1, LEAVES] of leaves whose first and last 8 columns come apart, [LEAVES, 8] each."""
    n = _to_integer(tl.maximum(tl.max(left, 1), tl.max(right, 1)))
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
        f = _pow2(k)
        if ENTROPY:
            u = tl.sum(f * tl.fma(s, tl.maximum(k, -127.0), u), 2)
        s = tl.sum(s * f, 2)
        n = top
        if not ENTROPY:
            u = s
    return n, s, u


def levels(nodes: int) -> int:
    """Levels of the tree over `nodes` nodes."""
    return (max(nodes, 1) - 1).bit_length()


def merge_portable(stats: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """(m, s, ...)[R, N] float64 -> [R]: neighbours merged until one is left.

    A third tensor is u = sum exp(z - m) (z - m).
    """
    m, s, *rest = stats
    while m.shape[-1] > 1:
        if m.shape[-1] % 2:
            m = torch.cat([m, torch.full_like(m[..., :1], -math.inf)], -1)
            s, *rest = (torch.cat([x, torch.zeros_like(x[..., :1])], -1) for x in (s, *rest))
        m, s, *rest = (x.unflatten(-1, (-1, 2)) for x in (m, s, *rest))
        top = m.amax(-1, keepdim=True)
        down = torch.where(m == -math.inf, -700.0, m - torch.where(top.isfinite(), top, 0.0))
        f = elementary.exp(down)
        if rest:
            u = f * (rest[0] + s * down)
            rest = [u[..., 0] + u[..., 1]]
        s = s * f
        m, s = top.squeeze(-1), s[..., 0] + s[..., 1]
    return tuple(x.squeeze(-1) for x in (m, s, *rest))


def block_portable(z: Tensor, entropy: bool = False) -> tuple[Tensor, ...]:
    """(m, s) or (m, s, u) [R] of z[R, V] in float64, V aligned columns of the vocabulary."""
    rows, v = z.shape
    z = torch.cat([z, z.new_full((rows, -v % LEAF), -math.inf)], -1) if v % LEAF else z
    z = z.unflatten(-1, (-1, LEAF))
    m = z.amax(-1, keepdim=True)
    y = z - torch.where(m == -math.inf, 0.0, m)
    e = elementary.exp(y)
    stats = [m.squeeze(-1), tree_sum(e).squeeze(-1)]
    if entropy:
        stats.append(tree_sum(torch.where(y == -math.inf, 0.0, e * y)).squeeze(-1))
    return merge_portable(tuple(stats))
