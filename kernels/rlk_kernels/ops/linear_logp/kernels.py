"""The Triton kernels of `linear_logp` and `linear_grpo_loss`, whose modules have the formulas.

Tile kernels: the matrix product of `matmul` (the same order and fp32 bits for any tile) with an
epilogue of `matmul/epilogue.py` (STATS, EXPONENTIALS or GRADIENT).
Row kernels: the logits of given ids (`_pick_kernel`), the tree above the tiles
(`_collapse_kernel`, `_finish_kernel`), the gradient at given ids (`_id_gradient_kernel`), and a
copy with zeros in rows without a gradient (`_copy_live_rows_kernel`).

T = tokens   V = columns of this launch   K = hidden size   J = ids a token
"""

import triton
import triton.language as tl

from rlk_kernels.matmul.epilogue import final_logits, finish_tile, softcap_slope
from rlk_kernels.matmul.steps import begins_segment, carry_high, tile_position
from rlk_kernels.numerics.lse_tree.kernels import LN2, NO_COLUMNS, merge_neighbours, scaled


@triton.jit(do_not_specialize=["T"])
def _tiles_tma_kernel(
    h_desc, w_desc, bias_ptr, n_ptr, s_ptr, u_ptr, a_ptr, b_ptr, out_desc, out_ptr, T, V, K, last,
    stride, cap, inverse_cap, scale, inverse, inverse_top,
    MODE: tl.constexpr, HAS_BIAS: tl.constexpr, LOGIT: tl.constexpr, SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr, ENTROPY: tl.constexpr, PARTIAL: tl.constexpr, RAGGED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, LEVELS: tl.constexpr,
    GROUP: tl.constexpr, FLATTEN: tl.constexpr,
    TMA_STORE: tl.constexpr, PERMUTED: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(T, BM) * tl.cdiv(V, BN)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n = tile_position(tile, T, V, BM, BN, GROUP)
        row = tile_m * BM
        col = tile_n * BN
        acc = tl.zeros((BM, BN), tl.float32)
        if SEGMENT > 0:
            high = tl.zeros_like(acc)
        for step in range(tl.cdiv(K, BK)):
            if SEGMENT > 0 and begins_segment(step * BK, SEGMENT, last):
                acc, high = carry_high(acc, high)
            h = h_desc.load([row, step * BK])
            if PERMUTED:
                w = tl.reshape(w_desc.load([col // 128, 0, 0, 0, step * BK]), (BN, BK))
            else:
                w = w_desc.load([col, step * BK])
            acc = tl.dot(h, w.T, acc)
        if SEGMENT > 0:
            acc += high
        finish_tile(
            acc, row, col, tile_n, bias_ptr, n_ptr, s_ptr, u_ptr, a_ptr, b_ptr, out_desc, out_ptr,
            T, V, stride, cap, inverse_cap, scale, inverse, inverse_top, MODE, HAS_BIAS, LOGIT,
            SOFTCAP, SCALED, ENTROPY, PARTIAL, RAGGED, BM, BN, LEVELS, TMA_STORE,
            PERMUTED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _tiles_pointer_kernel(
    h_ptr, w_ptr, bias_ptr, n_ptr, s_ptr, u_ptr, a_ptr, b_ptr, out_ptr, T, V, K, last,
    stride_h, stride_w, stride, cap, inverse_cap, scale, inverse, inverse_top,
    MODE: tl.constexpr, HAS_BIAS: tl.constexpr, LOGIT: tl.constexpr, SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr, ENTROPY: tl.constexpr, PARTIAL: tl.constexpr, RAGGED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, LEVELS: tl.constexpr,
    GROUP: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_position(tl.program_id(0), T, V, BM, BN, GROUP)
    row = tile_m * BM
    col = tile_n * BN
    rows = (row + tl.arange(0, BM)).to(tl.int64)
    cols = (col + tl.arange(0, BN)).to(tl.int64)
    acc = tl.zeros((BM, BN), tl.float32)
    if SEGMENT > 0:
        high = tl.zeros_like(acc)
    for step in range(tl.cdiv(K, BK)):
        if SEGMENT > 0 and begins_segment(step * BK, SEGMENT, last):
            acc, high = carry_high(acc, high)
        ks = step * BK + tl.arange(0, BK)
        h_at = h_ptr + rows[:, None] * stride_h + ks[None, :]
        w_at = w_ptr + cols[None, :] * stride_w + ks[:, None]
        h = tl.load(h_at, mask=(rows[:, None] < T) & (ks[None, :] < K), other=0.0)
        w = tl.load(w_at, mask=(ks[:, None] < K) & (cols[None, :] < V), other=0.0)
        acc = tl.dot(h, w, acc, input_precision="ieee")
    if SEGMENT > 0:
        acc += high
    finish_tile(
        acc, row, col, tile_n, bias_ptr, n_ptr, s_ptr, u_ptr, a_ptr, b_ptr, out_ptr, out_ptr, T, V,
        stride, cap, inverse_cap, scale, inverse, inverse_top, MODE, HAS_BIAS, LOGIT,
        SOFTCAP, SCALED, ENTROPY, PARTIAL, RAGGED, BM, BN, LEVELS, False, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _pick_kernel(
    h_ptr, w_ptr, bias_ptr, ids_ptr, z_ptr, T, V, K, last, J, stride_h, stride_w,
    cap, inverse_cap, scale, inverse,
    HAS_BIAS: tl.constexpr, LOGIT: tl.constexpr, SOFTCAP: tl.constexpr, SCALED: tl.constexpr,
    B: tl.constexpr, BK: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """z of ids[t, j], from the diagonal of a product with gathered rows of the weight."""
    rows = (tl.program_id(0) * B + tl.arange(0, B)).to(tl.int64)
    here = rows * J + tl.program_id(1)
    ids = tl.load(ids_ptr + here, mask=rows < T, other=-1)
    inside = (ids >= 0) & (ids < V)
    at = tl.where(inside, ids, 0).to(tl.int64)
    acc = tl.zeros((B, B), tl.float32)
    if SEGMENT > 0:
        high = tl.zeros_like(acc)
    for step in range(tl.cdiv(K, BK)):
        if SEGMENT > 0 and begins_segment(step * BK, SEGMENT, last):
            acc, high = carry_high(acc, high)
        ks = step * BK + tl.arange(0, BK)
        h_at = h_ptr + rows[:, None] * stride_h + ks[None, :]
        w_at = w_ptr + at[None, :] * stride_w + ks[:, None]
        h = tl.load(h_at, mask=(rows[:, None] < T) & (ks[None, :] < K), other=0.0)
        w = tl.load(w_at, mask=(ks[:, None] < K) & inside[None, :], other=0.0)
        acc = tl.dot(h, w, acc, input_precision="ieee")
    if SEGMENT > 0:
        acc += high
    diagonal = tl.arange(0, B)[:, None] == tl.arange(0, B)[None, :]
    acc = tl.sum(tl.where(diagonal, acc, 0.0), 0)[None, :]
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    z = final_logits(acc, bias, cap, inverse_cap, scale, inverse, HAS_BIAS, LOGIT, SOFTCAP, SCALED)
    z = tl.where(inside, tl.reshape(z, (B,)), float("nan"))
    tl.store(z_ptr + here, z, mask=rows < T)


@triton.jit
def _merged(
    n_ptr, s_ptr, u_ptr, rows, node, T, nodes,
    ENTROPY: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """(n, s, u)[ROWS] of the subtree of 2**LEVELS nodes from `node` on; a thread has whole rows."""
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
    """Merge statistics [nodes, T] into those LEVELS higher in the tree."""
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
    """The root of each row, and its lse, entropy and log-probabilities."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    n, s, u = _merged(n_ptr, s_ptr, u_ptr, rows, 0, T, nodes, ENTROPY, ROWS, LEVELS)
    s = tl.where(rows < T, s, 1.0)
    log_s = tl.log2(s)
    tl.store(row_n_ptr + rows, n, mask=rows < T)
    tl.store(row_s_ptr + rows, log_s, mask=rows < T)
    # n log(2) in two parts, so that a large n loses no digits
    lse = tl.fma(n, 0.693147182464599609375, tl.fma(n, -1.904654299957768e-09, log_s * LN2))
    tl.store(lse_ptr + rows, lse, mask=rows < T)
    if ENTROPY:
        tl.store(entropy_ptr + rows, (log_s - u / s) * LN2, mask=rows < T)
    for j in range(J):
        id = tl.load(ids_ptr + rows * J + j, mask=rows < T, other=-1)
        z = tl.load(z_ptr + rows * J + j, mask=rows < T, other=0.0)
        logp = (scaled(z, n) - log_s) * LN2
        tl.store(logp_ptr + rows * J + j, tl.where(id < 0, 0.0, logp), mask=rows < T)


@triton.jit
def _copy_live_rows_kernel(
    h_ptr, g_ptr, a_ptr, b_ptr, n_ptr, s_ptr, z_ptr, out_ptr, out_n_ptr, out_s_ptr, out_z_ptr,
    H, J, stride_h, stride_out, ENTROPY: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Copy h[t] and the statistics of a row. A row whose upstream gradients are all 0 gets zeros,
    and statistics that make its probabilities 0, so that none of its numbers, such as NaN, is part
    of a product."""
    row = tl.program_id(0).to(tl.int64)
    live = tl.load(a_ptr + row) != 0.0
    if ENTROPY:
        live = live | (tl.load(b_ptr + row) != 0.0)
    for j in range(J):
        live = live | (tl.load(g_ptr + row * J + j) != 0.0)
    cols = tl.program_id(1) * B + tl.arange(0, B)
    h = tl.load(h_ptr + row * stride_h + cols, mask=cols < tl.where(live, H, 0), other=0.0)
    tl.store(out_ptr + row * stride_out + cols, h, mask=cols < H)
    if tl.program_id(1) == 0:
        tl.store(out_n_ptr + row, tl.where(live, tl.load(n_ptr + row), 0.0))
        tl.store(out_s_ptr + row, tl.where(live, tl.load(s_ptr + row), 1e30))
        for j in range(J):
            z = tl.load(z_ptr + row * J + j)
            tl.store(out_z_ptr + row * J + j, tl.where(live, z, 0.0))


@triton.jit(do_not_specialize=["T", "first"])
def _id_gradient_kernel(
    out_ptr, ids_ptr, z_ptr, g_ptr, n_ptr, s_ptr, a_ptr, b_ptr, unit_ptr, T, J, first, V, stride,
    inverse_top, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, UNIT: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    """dlogits at those of ids[t, j] that are columns from `first` on: the tile's part and the part
    of the ids.

    An id that occurs twice in a row sums its gradients and writes the same number twice. UNIT:
    `out` contains dlogits divided by unit[t]; if unit[t] is 0, so is the row's gradient.
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
        upstream = tl.load(g_ptr + rows * J + i, mask=rows < T, other=0.0)
        g += tl.where(other == id, upstream, 0.0)
    d = tl.fma(tl.exp2(y), a, g)
    if SOFTCAP:
        d = d * softcap_slope(z, inverse_top)
    if UNIT:
        unit = tl.load(unit_ptr + rows, mask=rows < T, other=0.0)
        d = tl.where(unit == 0.0, 0.0, d / unit)
    col = id - first
    inside = (rows < T) & (id >= 0) & (col >= 0) & (col < V)
    tl.store(out_ptr + rows * stride + col, d.to(out_ptr.dtype.element_ty), mask=inside)
