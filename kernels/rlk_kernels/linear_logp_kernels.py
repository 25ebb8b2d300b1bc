"""The Triton kernels of `linear_logp` and `linear_grpo_loss`; formulas and orders in those files.

Tile kernels: the matrix product of `gemm.py` (same order, same fp32 bits, for any tile), and what
is done with a tile of logits while it is in registers:
    STATS     (n, s, u) of the tile's columns, one node of the tree in `lse_tree.py`, a row
    KEEP      STATS, and exp(z - log(2) r) times dz/d(logit), r of `reference`, the operands' dtype
    GRADIENT  dlogits[v] = p[v] (a + b log2 p[v]) dz/d(logit), at the operands' dtype
    LOGITS    the logits themselves, for `linear` (`linear_logp_hopper.chained_sums` alone)
RUNS: the rows of the weight are read in an order that gives each thread whole leaves. In the
accumulator a thread holds columns 2q, 2q + 1 of every 8 (q = its place in a group of four); the
tensor map puts column 32 q + 2 b + p of every 128 at 8 b + 2 q + p, so these are 32 neighbours. No
leaf is spread over threads: an eighth of the shuffles, a quarter of the merges, the same bits.
Row kernels: the logits of given ids (`_pick_kernel`), the tree above the tiles
(`_collapse_kernel`, `_finish_kernel`), the gradient at given ids (`_mark_kernel`), KEEP's values
brought to one reference a row (`linear_grpo_kernels.rebase`).

T = tokens   V = columns of this launch   K = hidden size   J = ids a token
"""

import triton
import triton.language as tl

from rlk_kernels.chains import begins, put_aside
from rlk_kernels.gemm import _tile_position
from rlk_kernels.lse_tree import (
    LEAF_COLUMNS,
    LN2,
    NO_COLUMNS,
    _pow2,
    _to_integer,
    leaf_stats,
    merge_neighbours,
    scaled,
)

STATS, KEEP, GRADIENT, LOGITS = (tl.constexpr(mode) for mode in range(4))
NEAR = tl.constexpr(60.0)
"""Powers of two that KEEP's exponentials may be off the largest of their row."""


@triton.jit
def _final_logits(
    acc, bias, cap, inverse_cap, scale, inverse,
    HAS_BIAS: tl.constexpr, LOGIT: tl.constexpr, SOFTCAP: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """z: bias, rounding to the logit dtype, softcap, logit scale, temperature, in this order."""
    if HAS_BIAS:
        acc += bias
    z = acc.to(LOGIT).to(tl.float32)
    if SOFTCAP:
        z = _softcapped(z, cap, inverse_cap)
    if SCALED:
        z = z * scale * inverse
    return z


@triton.jit
def _column(place, RUNS: tl.constexpr):
    """The column of a tile at a place of its accumulator."""
    if RUNS:
        column = place // 128 * 128 + place % 8 // 2 * 32 + place % 128 // 8 * 2 + place % 2
    else:
        column = place
    return column


@triton.jit
def _softcapped(x, cap, inverse_cap):
    """cap tanh(x / cap)."""
    t = tl.exp2(tl.abs(x) * inverse_cap * -2.8853900817779268)
    tanh = (1.0 - t) / (1.0 + t)
    return tl.where(x < 0.0, -cap, cap) * tanh


@triton.jit
def _slope(z, inverse_top):
    """dz/d(logit) of the softcap, from z itself; 1 / inverse_top is the largest z."""
    tanh = z * inverse_top
    return 1.0 - tanh * tanh


@triton.jit
def reference(n, z, HALF: tl.constexpr):
    """The integer r that KEEP's exponentials are relative to.

    That of the target's logit z, known before any tile: one number for the whole row. But n, the
    node's own, where the two are far apart (HALF: and in fp16, whose exponents do not reach far).
    """
    if HALF:
        r = n
    else:
        of_target = _to_integer(tl.where(z == z, z, 0.0))
        r = tl.where(tl.abs(n - of_target) <= NEAR, of_target, n)
    return r


@triton.jit
def _store_rounded(
    x, desc, ptr, row, col, T, V, stride,
    BM: tl.constexpr, BN: tl.constexpr, TMA_STORE: tl.constexpr,
):  # fmt: skip
    if TMA_STORE:
        desc.store([row, col], x.to(desc.dtype))
    else:
        rows = row + tl.arange(0, BM)
        cols = col + tl.arange(0, BN)
        at = ptr + rows.to(tl.int64)[:, None] * stride + cols[None, :]
        mask = (rows[:, None] < T) & (cols[None, :] < V)
        tl.store(at, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def tile_gradient(
    z, rows, T, n_ptr, s_ptr, a_ptr, b_ptr, inverse_top,
    ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """GRADIENT of a tile of final logits z[R, BN]."""
    inside = rows < T
    n = tl.load(n_ptr + rows, mask=inside, other=0.0)
    log_s = tl.load(s_ptr + rows, mask=inside, other=0.0)
    a = tl.load(a_ptr + rows, mask=inside, other=0.0)
    y = scaled(z, n[:, None]) - log_s[:, None]
    d = tl.exp2(y)
    if ENTROPY:
        b = tl.load(b_ptr + rows, mask=inside, other=0.0)
        d = tl.where(d > 0.0, d * tl.fma(y, b[:, None], a[:, None]), 0.0)
    else:
        d = d * a[:, None]
    if SOFTCAP:
        d = d * _slope(z, inverse_top)
    return d


@triton.jit
def _tile_end(
    acc, row, col, node, bias_ptr, n_ptr, s_ptr, u_ptr, a_ptr, b_ptr, out_desc, out_ptr,
    T, V, stride, cap, inverse_cap, scale, inverse, inverse_top,
    MODE: tl.constexpr, HAS_BIAS: tl.constexpr, LOGIT: tl.constexpr, SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr, ENTROPY: tl.constexpr, PARTIAL: tl.constexpr, RAGGED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, LEVELS: tl.constexpr, TMA_STORE: tl.constexpr,
    RUNS: tl.constexpr,
):  # fmt: skip
    rows = row + tl.arange(0, BM)
    cols = col + tl.arange(0, BN)
    bias = 0.0
    if HAS_BIAS:
        of = col + _column(tl.arange(0, BN), RUNS)
        bias = tl.load(bias_ptr + of, mask=of < V, other=0.0).to(tl.float32)[None, :]
    z = _final_logits(acc, bias, cap, inverse_cap, scale, inverse, HAS_BIAS, LOGIT, SOFTCAP, SCALED)
    if MODE == GRADIENT:
        d = tile_gradient(
            z, rows, T, n_ptr, s_ptr, a_ptr, b_ptr, inverse_top, ENTROPY, SOFTCAP
        )  # fmt: skip
        _store_rounded(d, out_desc, out_ptr, row, col, T, V, stride, BM, BN, TMA_STORE)
    else:
        LEAVES: tl.constexpr = BN // LEAF_COLUMNS
        full = z
        if RUNS:
            full = tl.reshape(z, (BM, BN // 128, 16, 4, 2))
            full = tl.reshape(tl.permute(full, (0, 1, 3, 2, 4)), (BM, BN))
        if RAGGED:
            full = tl.where(cols[None, :] < V, z, float("-inf"))
        n, s, u, e = leaf_stats(full, BM, LEAVES, ENTROPY)
        if PARTIAL:
            leaf = col // LEAF_COLUMNS + tl.arange(0, LEAVES)[None, :]
            some = leaf < tl.cdiv(V, LEAF_COLUMNS)
            n = tl.where(some, n, NO_COLUMNS)
            s = tl.where(some, s, 0.0)
            u = tl.where(some, u, 0.0)
        leaf_n = n
        n, s, u = merge_neighbours(n, s, u, BM, LEAVES, LEVELS, ENTROPY)
        n = tl.reshape(n, (BM,))
        at = node.to(tl.int64) * T + rows
        tl.store(n_ptr + at, n, mask=rows < T)
        tl.store(s_ptr + at, tl.reshape(s, (BM,)), mask=rows < T)
        if ENTROPY:
            tl.store(u_ptr + at, tl.reshape(u, (BM,)), mask=rows < T)
        if MODE == KEEP:
            target = tl.load(a_ptr + rows, mask=rows < T, other=0.0)
            base = reference(n, target, out_ptr.dtype.element_ty == tl.float16)
            e = tl.reshape(e * _pow2(leaf_n - base[:, None])[:, :, None], (BM, BN))
            if SOFTCAP:
                e = e * _slope(full, inverse_top)
            _store_rounded(e, out_desc, out_ptr, row, col, T, V, stride, BM, BN, TMA_STORE)


@triton.jit(do_not_specialize=["T"])
def _tiles_tma_kernel(
    h_desc, w_desc, bias_ptr, n_ptr, s_ptr, u_ptr, a_ptr, b_ptr, out_desc, out_ptr, T, V, K, last,
    stride, cap, inverse_cap, scale, inverse, inverse_top,
    MODE: tl.constexpr, HAS_BIAS: tl.constexpr, LOGIT: tl.constexpr, SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr, ENTROPY: tl.constexpr, PARTIAL: tl.constexpr, RAGGED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, LEVELS: tl.constexpr,
    GROUP: tl.constexpr, FLATTEN: tl.constexpr,
    TMA_STORE: tl.constexpr, RUNS: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(T, BM) * tl.cdiv(V, BN)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n = _tile_position(tile, T, V, BM, BN, GROUP)
        row = tile_m * BM
        col = tile_n * BN
        acc = tl.zeros((BM, BN), tl.float32)
        if CHAIN > 0:
            aside = tl.zeros_like(acc)
        for step in range(tl.cdiv(K, BK)):
            if CHAIN > 0 and begins(step * BK, CHAIN, last):
                acc, aside = put_aside(acc, aside)
            h = h_desc.load([row, step * BK])
            if RUNS:
                w = tl.reshape(w_desc.load([col // 128, 0, 0, 0, step * BK]), (BN, BK))
            else:
                w = w_desc.load([col, step * BK])
            acc = tl.dot(h, w.T, acc)
        if CHAIN > 0:
            acc += aside
        _tile_end(
            acc, row, col, tile_n, bias_ptr, n_ptr, s_ptr, u_ptr, a_ptr, b_ptr, out_desc, out_ptr,
            T, V, stride, cap, inverse_cap, scale, inverse, inverse_top, MODE, HAS_BIAS, LOGIT,
            SOFTCAP, SCALED, ENTROPY, PARTIAL, RAGGED, BM, BN, LEVELS, TMA_STORE,
            RUNS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _tiles_pointer_kernel(
    h_ptr, w_ptr, bias_ptr, n_ptr, s_ptr, u_ptr, a_ptr, b_ptr, out_ptr, T, V, K, last,
    stride_h, stride_w, stride, cap, inverse_cap, scale, inverse, inverse_top,
    MODE: tl.constexpr, HAS_BIAS: tl.constexpr, LOGIT: tl.constexpr, SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr, ENTROPY: tl.constexpr, PARTIAL: tl.constexpr, RAGGED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, LEVELS: tl.constexpr,
    GROUP: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = _tile_position(tl.program_id(0), T, V, BM, BN, GROUP)
    row = tile_m * BM
    col = tile_n * BN
    rows = (row + tl.arange(0, BM)).to(tl.int64)
    cols = (col + tl.arange(0, BN)).to(tl.int64)
    acc = tl.zeros((BM, BN), tl.float32)
    if CHAIN > 0:
        aside = tl.zeros_like(acc)
    for step in range(tl.cdiv(K, BK)):
        if CHAIN > 0 and begins(step * BK, CHAIN, last):
            acc, aside = put_aside(acc, aside)
        ks = step * BK + tl.arange(0, BK)
        h_at = h_ptr + rows[:, None] * stride_h + ks[None, :]
        w_at = w_ptr + cols[None, :] * stride_w + ks[:, None]
        h = tl.load(h_at, mask=(rows[:, None] < T) & (ks[None, :] < K), other=0.0)
        w = tl.load(w_at, mask=(ks[:, None] < K) & (cols[None, :] < V), other=0.0)
        acc = tl.dot(h, w, acc, input_precision="ieee")
    if CHAIN > 0:
        acc += aside
    _tile_end(
        acc, row, col, tile_n, bias_ptr, n_ptr, s_ptr, u_ptr, a_ptr, b_ptr, out_ptr, out_ptr, T, V,
        stride, cap, inverse_cap, scale, inverse, inverse_top, MODE, HAS_BIAS, LOGIT,
        SOFTCAP, SCALED, ENTROPY, PARTIAL, RAGGED, BM, BN, LEVELS, False, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _pick_kernel(
    h_ptr, w_ptr, bias_ptr, ids_ptr, z_ptr, T, V, K, last, J, stride_h, stride_w,
    cap, inverse_cap, scale, inverse,
    HAS_BIAS: tl.constexpr, LOGIT: tl.constexpr, SOFTCAP: tl.constexpr, SCALED: tl.constexpr,
    B: tl.constexpr, BK: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """z of ids[t, j]: the diagonal of a product with gathered rows of the weight."""
    rows = (tl.program_id(0) * B + tl.arange(0, B)).to(tl.int64)
    here = rows * J + tl.program_id(1)
    ids = tl.load(ids_ptr + here, mask=rows < T, other=-1)
    inside = (ids >= 0) & (ids < V)
    at = tl.where(inside, ids, 0).to(tl.int64)
    acc = tl.zeros((B, B), tl.float32)
    if CHAIN > 0:
        aside = tl.zeros_like(acc)
    for step in range(tl.cdiv(K, BK)):
        if CHAIN > 0 and begins(step * BK, CHAIN, last):
            acc, aside = put_aside(acc, aside)
        ks = step * BK + tl.arange(0, BK)
        h_at = h_ptr + rows[:, None] * stride_h + ks[None, :]
        w_at = w_ptr + at[None, :] * stride_w + ks[:, None]
        h = tl.load(h_at, mask=(rows[:, None] < T) & (ks[None, :] < K), other=0.0)
        w = tl.load(w_at, mask=(ks[:, None] < K) & inside[None, :], other=0.0)
        acc = tl.dot(h, w, acc, input_precision="ieee")
    if CHAIN > 0:
        acc += aside
    own = tl.arange(0, B)[:, None] == tl.arange(0, B)[None, :]
    acc = tl.sum(tl.where(own, acc, 0.0), 0)[None, :]
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    z = _final_logits(acc, bias, cap, inverse_cap, scale, inverse, HAS_BIAS, LOGIT, SOFTCAP, SCALED)
    z = tl.where(inside, tl.reshape(z, (B,)), float("nan"))
    tl.store(z_ptr + here, z, mask=rows < T)


@triton.jit
def _merged(
    n_ptr, s_ptr, u_ptr, rows, node, T, nodes,
    ENTROPY: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """(n, s, u)[ROWS] of the subtree of 2**LEVELS nodes from `node`; a thread has whole rows."""
    ids = (node + tl.arange(0, 1 << LEVELS)).to(tl.int64)
    at = rows[:, None] + ids[None, :] * T
    there = (rows[:, None] < T) & (ids[None, :] < nodes)
    n = tl.load(n_ptr + at, mask=there, other=NO_COLUMNS)
    s = tl.load(s_ptr + at, mask=there, other=0.0)
    u = s
    if ENTROPY:
        u = tl.load(u_ptr + at, mask=there, other=0.0)
    n, s, u = merge_neighbours(n, s, u, ROWS, 1 << LEVELS, LEVELS, ENTROPY)
    return tl.reshape(n, (ROWS,)), tl.reshape(s, (ROWS,)), tl.reshape(u, (ROWS,))


@triton.jit(do_not_specialize=["T"])
def _collapse_kernel(
    n_ptr, s_ptr, u_ptr, up_n_ptr, up_s_ptr, up_u_ptr, T, nodes,
    ENTROPY: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Stats[nodes, T] to those LEVELS higher in the tree."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    node = tl.program_id(1)
    n, s, u = _merged(
        n_ptr, s_ptr, u_ptr, rows, node << LEVELS, T, nodes, ENTROPY, ROWS, LEVELS
    )  # fmt: skip
    at = node.to(tl.int64) * T + rows
    tl.store(up_n_ptr + at, n, mask=rows < T)
    tl.store(up_s_ptr + at, s, mask=rows < T)
    if ENTROPY:
        tl.store(up_u_ptr + at, u, mask=rows < T)


@triton.jit(do_not_specialize=["T"])
def _finish_kernel(
    n_ptr, s_ptr, u_ptr, ids_ptr, z_ptr, logp_ptr, lse_ptr, entropy_ptr, row_n_ptr, row_s_ptr,
    T, J, nodes, ENTROPY: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """The root of each row, and what is read off it."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    n, s, u = _merged(n_ptr, s_ptr, u_ptr, rows, 0, T, nodes, ENTROPY, ROWS, LEVELS)
    s = tl.where(rows < T, s, 1.0)
    log_s = tl.log2(s)
    tl.store(row_n_ptr + rows, n, mask=rows < T)
    tl.store(row_s_ptr + rows, log_s, mask=rows < T)
    # n log(2) in two parts: a large n costs no digits
    lse = tl.fma(n, 0.693147182464599609375, tl.fma(n, -1.904654299957768e-09, log_s * LN2))
    tl.store(lse_ptr + rows, lse, mask=rows < T)
    if ENTROPY:
        tl.store(entropy_ptr + rows, (log_s - u / s) * LN2, mask=rows < T)
    for j in range(J):
        id = tl.load(ids_ptr + rows * J + j, mask=rows < T, other=-1)
        z = tl.load(z_ptr + rows * J + j, mask=rows < T, other=0.0)
        logp = (scaled(z, n) - log_s) * LN2
        tl.store(logp_ptr + rows * J + j, tl.where(id < 0, 0.0, logp), mask=rows < T)


@triton.jit(do_not_specialize=["T", "first"])
def _mark_kernel(
    out_ptr, ids_ptr, z_ptr, g_ptr, n_ptr, s_ptr, a_ptr, b_ptr, unit_ptr, T, J, first, V, stride,
    inverse_top, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, UNIT: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    """dlogits at ids[t, j], those in the columns from `first`: the tile's part and the ids' own.

    Ids that occur twice in a row sum their gradients and write the same number twice. UNIT: `out`
    holds dlogits divided by unit[t]; where that is 0, so is the row's gradient.
    """
    rows = (tl.program_id(0) * B + tl.arange(0, B)).to(tl.int64)
    id = tl.load(ids_ptr + rows * J + tl.program_id(1), mask=rows < T, other=-1)
    z = tl.load(z_ptr + rows * J + tl.program_id(1), mask=rows < T, other=0.0)
    n = tl.load(n_ptr + rows, mask=rows < T, other=0.0)
    log_s = tl.load(s_ptr + rows, mask=rows < T, other=0.0)
    a = tl.load(a_ptr + rows, mask=rows < T, other=0.0)
    y = scaled(z, n) - log_s
    if ENTROPY:
        a = tl.fma(y, tl.load(b_ptr + rows, mask=rows < T, other=0.0), a)
    g = tl.zeros((B,), tl.float32)
    for i in range(J):
        other = tl.load(ids_ptr + rows * J + i, mask=rows < T, other=-1)
        own = tl.load(g_ptr + rows * J + i, mask=rows < T, other=0.0)
        g += tl.where(other == id, own, 0.0)
    d = tl.fma(tl.exp2(y), a, g)
    if SOFTCAP:
        d = d * _slope(z, inverse_top)
    if UNIT:
        unit = tl.load(unit_ptr + rows, mask=rows < T, other=0.0)
        d = tl.where(unit == 0.0, 0.0, d / unit)
    col = id - first
    inside = (rows < T) & (id >= 0) & (col >= 0) & (col < V)
    tl.store(out_ptr + rows * stride + col, d.to(out_ptr.dtype.element_ty), mask=inside)
