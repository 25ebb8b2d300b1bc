"""The tree in float64 and natural units: m = max z replaces n, and (m, s) represents s exp(m)."""

import math

import torch
from torch import Tensor

from rlk_kernels.numerics import elementary
from rlk_kernels.numerics.lse_tree.tree import LEAF
from rlk_kernels.numerics.rows import tree_sum


def merge_portable(stats: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """(m, s)[R, N] or (m, s, u)[R, N] in float64 -> [R]: merge neighbours until one node remains.

    u = sum exp(z - m) (z - m), for the entropy.
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
    """(m, s) or (m, s, u) [R] of z[R, V] in float64, of V aligned columns of the vocabulary."""
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
