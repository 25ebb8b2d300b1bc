"""Softmax statistics of a row of the vocabulary in one fixed binary tree. `logp` and `linear_logp`
both use the tree, so they agree bit for bit.

    sum_v exp(z[v]) = s * 2**n          n an integer, s in fp32; the natural logarithm is
    log(s) + n log(2)

Leaf: LEAF aligned columns. n = max_v z[v] * log2(e), rounded to an integer; the terms
2**(z[v] log2(e) - n) are added in pairs of neighbours, then pairs of pairs, and so on.
Node: two neighbours, (n1, s1) + (n2, s2) = (n, s1 2**(n1 - n) + s2 2**(n2 - n)), n = max(n1, n2).
Scaling by powers of two is exact, so a node has one rounding, whether or not the compiler fuses the
multiplication with the addition. Terms below 2**-127 of their node are dropped.

The tree depends on column indices alone: a tile of the vocabulary is a whole subtree, a missing
column is neutral, and shards of any multiple of LEAF columns merge to the bits of the whole. The
entropy needs a third number, u = sum_v 2**y y with y = z log2(e) - n.

Portable backend: the same tree in float64, where m = max z replaces n: (m, s) represents s exp(m).
"""

LEAF = 16
"""Columns of a leaf, which is part of the order of the sum. Shards of a vocabulary are multiples of
it."""
NOTHING = -(2.0**30)
"""The n of a node without columns. It is finite, so that no difference of two n is NaN."""


def levels(nodes: int) -> int:
    """Levels of the tree over `nodes` nodes."""
    return (max(nodes, 1) - 1).bit_length()
