"""What a kernel does with a tile of logits in registers. The formulas are those of the operators.

    STATS     (n, s, u) of each row over the tile's columns: one node of the tree of `lse_tree`
    EXPONENTIALS  STATS, and exp(z - log(2) r) times dz/d(logit) in the operands' dtype, with r of
              `reference_exponent`
    GRADIENT  dlogits[v] = p[v] (a + b log2 p[v]) dz/d(logit) in the operands' dtype
    LOGITS    the logits themselves, for `linear` (`hopper/epilogue.py` alone)
PERMUTED: the rows of the weight are read in an order that gives each thread whole leaves. In the
accumulator, thread q of a group of four has columns 2q and 2q + 1 of every 8. The tensor map puts
column 32 q + 2 b + p of every 128 at 8 b + 2 q + p, so these columns are 32 neighbours. As no leaf
is spread over threads, this takes an eighth of the shuffles and a quarter of the merges, with the
same bits.

T = tokens   V = columns of this launch
"""

import triton
import triton.language as tl

from rlk_kernels.numerics.lse_tree.kernels import (
    LEAF_COLUMNS,
    NO_COLUMNS,
    leaf_stats,
    merge_neighbours,
    nearest_exponent,
    pow2,
    scaled,
)

STATS, EXPONENTIALS, GRADIENT, LOGITS = (tl.constexpr(mode) for mode in range(4))
MODES = {
    "statistics": STATS, "exponentials": EXPONENTIALS, "gradient": GRADIENT, "logits": LOGITS
}  # fmt: skip
"""`plan.Epilogue` -> the mode of the kernels."""
NEAR = tl.constexpr(60.0)
"""The largest distance of r from a node's exponent n, in powers of two."""


@triton.jit
def final_logits(
    acc, bias, cap, inverse_cap, scale, inverse,
    HAS_BIAS: tl.constexpr, LOGIT: tl.constexpr, SOFTCAP: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """z: bias, rounding to the logit dtype, softcap, logit scale, temperature, in this order."""
    if HAS_BIAS:
        acc += bias
    z = acc.to(LOGIT).to(tl.float32)
    if SOFTCAP:
        z = softcapped(z, cap, inverse_cap)
    if SCALED:
        z = z * scale * inverse
    return z


@triton.jit
def column_at(index, PERMUTED: tl.constexpr):
    """The column of a tile at an index of its accumulator."""
    if PERMUTED:
        column = index // 128 * 128 + index % 8 // 2 * 32 + index % 128 // 8 * 2 + index % 2
    else:
        column = index
    return column


@triton.jit
def softcapped(x, cap, inverse_cap):
    """cap tanh(x / cap)."""
    t = tl.exp2(tl.abs(x) * inverse_cap * -2.8853900817779268)
    tanh = (1.0 - t) / (1.0 + t)
    return tl.where(x < 0.0, -cap, cap) * tanh


@triton.jit
def softcap_slope(z, inverse_top):
    """dz/d(logit) of the softcap, computed from z; 1 / inverse_top is the largest z."""
    tanh = z * inverse_top
    return 1.0 - tanh * tanh


@triton.jit
def reference_exponent(n, z, HALF: tl.constexpr):
    """The integer r that EXPONENTIALS are relative to.

    r is the exponent of the target's logit z, which is known before any tile and is the same for
    the whole row. Where it is far from n, the node's exponent, r is n; and always in fp16 (HALF),
    whose range of exponents is small.
    """
    if HALF:
        r = n
    else:
        of_target = nearest_exponent(tl.where(z == z, z, 0.0))
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
    """The GRADIENT of a tile of final logits z[R, BN]."""
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
        d = d * softcap_slope(z, inverse_top)
    return d


@triton.jit
def finish_tile(
    acc, row, col, node, bias_ptr, n_ptr, s_ptr, u_ptr, a_ptr, b_ptr, out_desc, out_ptr,
    T, V, stride, cap, inverse_cap, scale, inverse, inverse_top,
    MODE: tl.constexpr, HAS_BIAS: tl.constexpr, LOGIT: tl.constexpr, SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr, ENTROPY: tl.constexpr, PARTIAL: tl.constexpr, RAGGED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, LEVELS: tl.constexpr, TMA_STORE: tl.constexpr,
    PERMUTED: tl.constexpr,
):  # fmt: skip
    rows = row + tl.arange(0, BM)
    cols = col + tl.arange(0, BN)
    bias = 0.0
    if HAS_BIAS:
        of = col + column_at(tl.arange(0, BN), PERMUTED)
        bias = tl.load(bias_ptr + of, mask=of < V, other=0.0).to(tl.float32)[None, :]
    z = final_logits(acc, bias, cap, inverse_cap, scale, inverse, HAS_BIAS, LOGIT, SOFTCAP, SCALED)
    if MODE == GRADIENT:
        d = tile_gradient(
            z, rows, T, n_ptr, s_ptr, a_ptr, b_ptr, inverse_top, ENTROPY, SOFTCAP
        )  # fmt: skip
        _store_rounded(d, out_desc, out_ptr, row, col, T, V, stride, BM, BN, TMA_STORE)
    else:
        LEAVES: tl.constexpr = BN // LEAF_COLUMNS
        full = z
        if PERMUTED:
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
        if MODE == EXPONENTIALS:
            target = tl.load(a_ptr + rows, mask=rows < T, other=0.0)
            base = reference_exponent(n, target, out_ptr.dtype.element_ty == tl.float16)
            e = tl.reshape(e * pow2(leaf_n - base[:, None])[:, :, None], (BM, BN))
            if SOFTCAP:
                e = e * softcap_slope(full, inverse_top)
            _store_rounded(e, out_desc, out_ptr, row, col, T, V, stride, BM, BN, TMA_STORE)
