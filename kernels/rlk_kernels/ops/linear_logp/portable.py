"""linear_logp in PyTorch: error-free products and the tree of `lse_tree` in float64, block by block
of the vocabulary.

Every step depends on the row alone: the sums of products are error-free
(`numerics/error_free.py`), and everything else is elementwise or a tree of fixed shape. Sums over
blocks of the vocabulary are computed from front to back in float64. dlogits are rounded to the
operands' dtype before the two products of the backward.

T = tokens   V = vocabulary   H = hidden size   J = ids a token
"""

import functools

import torch
from torch import Tensor

from rlk_kernels.matmul.portable import product
from rlk_kernels.numerics import elementary
from rlk_kernels.numerics.dtypes import wide_dtype
from rlk_kernels.numerics.error_free import matmul_nt
from rlk_kernels.numerics.lse_tree.portable import block_portable, merge_portable
from rlk_kernels.numerics.rows import by_rows, tree_sum
from rlk_kernels.ops.linear_logp.options import LogitOptions, RowStatistics
from rlk_kernels.ops.softcap.portable import capped

BLOCK_V = 8192
"""Columns of a block, a power of two. As a block is a whole subtree, its size changes no bit of the
statistics; it is part of the order of the hidden gradient's sum."""
BLOCK_T = 1024
"""Rows of logits at a time (memory only)."""


def final_logits(x: Tensor, spec: LogitOptions) -> Tensor:
    """z in float64 from logits in the logit dtype, with each step rounded to fp32 (or float64)."""
    wide = wide_dtype(x.dtype)
    z = x.to(wide)
    if spec.softcap:
        z = capped(z, spec.softcap).to(wide)
    if spec.scale != 1.0:
        z = z * spec.scale
    inverse = 1.0 / spec.temperature if wide == torch.float64 else spec.inverse
    return (z * inverse).double()


def softcap_slope(z: Tensor, spec: LogitOptions) -> Tensor | float:
    """dz/d(logit) of the softcap, computed from z."""
    if not spec.softcap:
        return 1.0
    tanh = z * spec.inverse_top
    return 1.0 - tanh * tanh


def _blocks(v: int) -> list[tuple[int, int]]:
    return [(first, min(first + BLOCK_V, v)) for first in range(0, v, BLOCK_V)]


def _logits(
    h: Tensor, w: Tensor, bias: Tensor | None, spec: LogitOptions, first: int, last: int
) -> Tensor:
    part = None if bias is None else bias[first:last]
    dtype = torch.float64 if h.dtype == torch.float64 else spec.logit_dtype
    return product(h, w[first:last], part, False, True, dtype)


def _row_blocks(t: int) -> list[slice]:
    return [slice(first, min(first + BLOCK_T, t)) for first in range(0, t, BLOCK_T)]


def _cat(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat(parts) if parts else like


def forward(
    h: Tensor, w: Tensor, bias: Tensor | None, ids: Tensor, spec: LogitOptions, entropy: bool
) -> RowStatistics:
    """The statistics of h[T, H], w[V, H] and ids[T, J] or [T]; n is the maximum, log_s natural."""
    shape, ids = ids.shape, ids[:, None] if ids.dim() == 1 else ids
    wide = wide_dtype(h.dtype)
    t, v = h.shape[0], w.shape[0]
    bad = (ids >= v).any()
    if bool(bad):
        raise IndexError(f"linear_logp: an id of {int(ids.max())} is not below V = {v}")
    z_ids = torch.zeros(ids.shape, dtype=torch.float64, device=h.device)
    nodes: list[list[Tensor]] = [[] for _ in range(3 if entropy else 2)]
    for first, last in _blocks(v):
        partials: list[list[Tensor]] = [[] for _ in nodes]
        for part in _row_blocks(t):
            logits = _logits(h[part], w, bias, spec, first, last)
            stats = by_rows(lambda x: block_portable(final_logits(x, spec), entropy), logits)
            for into, x in zip(partials, stats, strict=True):
                into.append(x)
            row_ids = ids[part]
            inside = (row_ids >= first) & (row_ids < last)
            at = torch.where(inside, row_ids - first, 0)
            z_ids[part] = torch.where(inside, final_logits(logits.gather(1, at), spec), z_ids[part])
        for into, parts in zip(nodes, partials, strict=True):
            into.append(_cat(parts, z_ids.new_empty(0)))
    m, s, *rest = merge_portable(tuple(torch.stack(x, -1) for x in nodes))
    log_s = elementary.log(s)
    logp = (z_ids - m[:, None]) - log_s[:, None]
    logp = torch.where(ids < 0, 0.0, logp)
    of_rows = (log_s - rest[0] / s) if entropy else m.new_empty(0)
    logp, z_ids = logp.to(wide).view(shape), z_ids.view(shape)
    return RowStatistics(logp, (m + log_s).to(wide), of_rows.to(wide), m, log_s, z_ids)


def backward(
    h: Tensor, w: Tensor, bias: Tensor | None, ids: Tensor, rows: RowStatistics, g: Tensor,
    g_lse: Tensor | None, g_entropy: Tensor | None, spec: LogitOptions, needs: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """(dh, dw, dbias); a gradient that `needs` excludes is None."""
    (t, k), v = h.shape, w.shape[0]
    wide = wide_dtype(h.dtype)
    g = torch.where(ids < 0, 0.0, g.double())
    a = -tree_sum(g).squeeze(-1)
    if g_lse is not None:
        a = a + g_lse.double()
    b = torch.zeros_like(a)
    if g_entropy is not None:
        b = -g_entropy.double()
        a = torch.where(b == 0, a, a + b * rows.entropy.double())
    # 0 x NaN is NaN, so rows without a gradient are zero in the products
    live = (g != 0).any(1) | (a != 0) | (b != 0)
    h = torch.where(live[:, None], h, 0.0)

    def dlogits(logits, row_ids, g, m, log_s, a, b, live, first):
        z = final_logits(logits, spec)
        y = (z - m[:, None]) - log_s[:, None]
        p = elementary.exp(y)
        d = p * (a[:, None] + b[:, None] * torch.where(p > 0, y, 0.0))
        inside = (row_ids >= first) & (row_ids < first + logits.shape[1])
        at = torch.where(inside, row_ids - first, 0)
        for j in range(row_ids.shape[1]):  # one id at a time, for a fixed order of equal ids
            d.scatter_add_(1, at[:, j : j + 1], torch.where(inside, g, 0.0)[:, j : j + 1])
        d = d * softcap_slope(z, spec) * spec.slope
        return torch.where(live[:, None], d, 0.0).to(wide).to(h.dtype)

    dh = torch.zeros(t, k, dtype=torch.float64, device=h.device) if needs[0] else None
    dw = torch.zeros_like(w) if needs[1] else None
    db = torch.zeros(v, dtype=torch.float64, device=w.device) if needs[2] else None
    if t == 0:
        return None if dh is None else dh.to(h.dtype), dw, None if db is None else db.to(wide)
    for first, last in _blocks(v):
        parts = []
        for part in _row_blocks(t):
            logits = _logits(h[part], w, bias, spec, first, last)
            per_row = (ids, g, rows.n, rows.log_s, a, b, live)
            of_block = functools.partial(dlogits, first=first)
            parts.append(by_rows(of_block, logits, *(x[part] for x in per_row)))
        d = torch.cat(parts)
        if dh is not None:
            dh += matmul_nt(d, w[first:last].mT)
        if dw is not None:
            dw[first:last] = matmul_nt(d.mT, h.mT).to(wide).to(w.dtype)
        if db is not None:
            db[first:last] = matmul_nt(d.mT, h.new_ones(1, t)).squeeze(-1)
    return (
        None if dh is None else dh.to(wide).to(h.dtype),
        dw,
        None if db is None else db.to(wide),
    )
