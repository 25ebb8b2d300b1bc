# ruff: noqa: SIM108 (if statements on constexprs, no ternaries)
"""The Triton kernels of `grouped_linear` and `grouped_swiglu`: one launch over (expert, row block,
column block).

    C[s, n] = round( sum_{k = 0, 1, ...} A[s // each, k] * B[e(s)][k, n]  (+ bias[e(s), n]) )
    C[s, n] = round( silu(round(G[s, n])) * round(U[s, n]) )        ACT: G, U the halves of columns

Order: that of `matmul/kernels.py`, one fp32 accumulator from front to back. The self-check of
`matmul` covers the shapes of the tiles, so a row has the bits of `linear`. A program finds its
expert and rows from `offsets` on the device; programs after the last tile end at once.
"""

import triton
import triton.language as tl

from rlk_kernels.ops.overlap import begin_overlapped


@triton.jit
def _find_rows(tile, offsets_ptr, S, E, BM: tl.constexpr, BE: tl.constexpr):
    """(expert, first of the tile's rows in `order`, end of the expert's rows) of a row tile. Expert
    E has the dropped rows; a larger one has none."""
    experts = tl.arange(0, BE)
    begin = tl.load(offsets_ptr + experts, mask=experts <= E, other=S)
    end = tl.load(offsets_ptr + experts + 1, mask=experts < E, other=S)
    tiles = tl.cdiv(end - begin, BM)
    last = tl.cumsum(tiles, 0)
    expert = tl.sum((last <= tile).to(tl.int32), 0)
    here = experts == expert
    first = tl.sum(tl.where(here, begin + (tile - last + tiles) * BM, 0), 0)
    return expert, first, tl.sum(tl.where(here, end, 0), 0)


@triton.jit
def _rows_by_weight(
    a_ptr, b_ptr, b_desc, c_ptr, bias_ptr, order_ptr, first, end, expert, col, N, K, E, each,
    stride_be, stride_bk, stride_bn,
    TRANS_B: tl.constexpr, TMA_B: tl.constexpr, ACT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FULL_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute BM rows from `first` on and BN columns from `col` on. After the last row, that row is
    read again and not written. FULL_K: K is a multiple of BK. ACT: B is transposed and has 2 N
    columns."""
    at = first + tl.arange(0, BM)
    rows = tl.load(order_ptr + tl.minimum(at, end - 1)).to(tl.int64)
    cols = col + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    second = tl.zeros((BM, BN), tl.float32)
    if expert < E:
        row_b = expert * N
        if ACT:
            row_b += expert * N
        a_at = a_ptr + (rows // each)[:, None] * K + ks[None, :]
        b_at = b_ptr + expert.to(tl.int64) * stride_be
        b_at += ks.to(tl.int64)[:, None] * stride_bk + cols.to(tl.int64)[None, :] * stride_bn
        for step in range(tl.cdiv(K, BK)):
            k = step * BK
            if FULL_K:
                a = tl.load(a_at)
            else:
                a = tl.load(a_at, mask=ks[None, :] < K - k, other=0.0)
            if TMA_B:
                if TRANS_B:
                    b = b_desc.load([row_b + col, k]).T
                else:
                    b = b_desc.load([expert * K + k, col])
            else:
                there = (ks[:, None] < K - k) & (cols[None, :] < N)
                b = tl.load(b_at, mask=there, other=0.0)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
            if ACT:
                if TMA_B:
                    u = b_desc.load([row_b + N + col, k]).T
                else:
                    u = tl.load(b_at + tl.cast(N, tl.int64) * stride_bn, mask=there, other=0.0)
                second = tl.dot(a, u, second, input_precision=PRECISION)
            a_at += BK
            b_at += tl.cast(BK, tl.int64) * stride_bk
        if HAS_BIAS:
            biases = bias_ptr + expert.to(tl.int64) * N + cols
            acc += tl.load(biases, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    if ACT:
        dtype = c_ptr.dtype.element_ty
        g, u = acc.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
        acc = g / (1.0 + tl.exp(-g)) * u  # as `ops/swiglu/kernels.py`
    where = c_ptr + rows[:, None] * N + cols[None, :]
    mask = (at[:, None] < end) & (cols[None, :] < N)
    tl.store(where, acc.to(c_ptr.dtype.element_ty), mask=mask)


# S and row_tiles change with the number of tokens. To specialize them would not improve the code,
# and would compile a variant for each of their values while an engine captures its graphs.
@triton.jit(do_not_specialize=["S", "row_tiles"])
def _grouped_kernel(
    a_ptr, b_ptr, b_desc, c_ptr, bias_ptr, order_ptr, offsets_ptr, S, N, K, E, each, row_tiles,
    stride_be, stride_bk, stride_bn,
    TRANS_B: tl.constexpr, TMA_B: tl.constexpr, ACT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FEW: tl.constexpr, GROUP: tl.constexpr,
    BE: tl.constexpr, FULL_K: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """TRANS_B: B[e] is a transposed weight [N, K], otherwise a weight [K, N]. FEW: the rows of a
    shorter tile for the last rows of an expert; 0: none."""
    begin_overlapped(OVERLAP)
    tiles_n = tl.cdiv(N, BN)
    per_group = GROUP * tiles_n
    pid = tl.program_id(0)
    base = (pid // per_group) * GROUP
    size = tl.minimum(row_tiles - base, GROUP)
    tile = base + (pid % per_group) % size
    col = (pid % per_group) // size * BN
    expert, first, end = _find_rows(tile, offsets_ptr, S, E, BM, BE)
    if expert > E:
        return
    if FEW > 0:
        if end - first <= FEW:
            _rows_by_weight(
                a_ptr, b_ptr, b_desc, c_ptr, bias_ptr, order_ptr, first, end, expert, col, N, K, E,
                each, stride_be, stride_bk, stride_bn, TRANS_B, TMA_B, ACT, HAS_BIAS, FEW, BN,
                BK, FULL_K, PRECISION,
            )  # fmt: skip
        else:
            _rows_by_weight(
                a_ptr, b_ptr, b_desc, c_ptr, bias_ptr, order_ptr, first, end, expert, col, N, K, E,
                each, stride_be, stride_bk, stride_bn, TRANS_B, TMA_B, ACT, HAS_BIAS, BM, BN,
                BK, FULL_K, PRECISION,
            )  # fmt: skip
    else:
        _rows_by_weight(
            a_ptr, b_ptr, b_desc, c_ptr, bias_ptr, order_ptr, first, end, expert, col, N, K, E,
            each, stride_be, stride_bk, stride_bn, TRANS_B, TMA_B, ACT, HAS_BIAS, BM, BN, BK,
            FULL_K, PRECISION,
        )  # fmt: skip


@triton.jit
def _grouped_weight_kernel(
    dy_ptr, x_ptr, dw_ptr, order_ptr, offsets_ptr, N, K, each,
    BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dweight[e, n, k] = sum of dy[s, n] * x[s // each, k] over the rows of an expert, by token."""
    expert = tl.program_id(1)
    tiles_n = tl.cdiv(N, BN)
    ns = (tl.program_id(0) % tiles_n) * BN + tl.arange(0, BN)
    ks = (tl.program_id(0) // tiles_n) * BK + tl.arange(0, BK)
    begin, end = tl.load(offsets_ptr + expert), tl.load(offsets_ptr + expert + 1)
    acc = tl.zeros((BN, BK), tl.float32)
    for start in range(begin, end, BR):
        at = start + tl.arange(0, BR)
        rows = tl.load(order_ptr + at, mask=at < end, other=0).to(tl.int64)
        dy = tl.load(
            dy_ptr + rows[:, None] * N + ns[None, :],
            mask=(at[:, None] < end) & (ns[None, :] < N), other=0.0,
        )  # fmt: skip
        x = tl.load(
            x_ptr + (rows // each)[:, None] * K + ks[None, :],
            mask=(at[:, None] < end) & (ks[None, :] < K), other=0.0,
        )  # fmt: skip
        acc = tl.dot(dy.T, x, acc, input_precision=PRECISION)
    where = dw_ptr + expert.to(tl.int64) * N * K + ns.to(tl.int64)[:, None] * K + ks[None, :]
    mask = (ns[:, None] < N) & (ks[None, :] < K)
    tl.store(where, acc.to(dw_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _grouped_bias_kernel(
    dy_ptr, db_ptr, order_ptr, offsets_ptr, N, BN: tl.constexpr, BR: tl.constexpr
):
    """dbias[e, n] = sum of dy[s, n] over the rows of an expert: BR rows in one fixed order, then
    the next."""
    expert = tl.program_id(1)
    ns = tl.program_id(0) * BN + tl.arange(0, BN)
    begin, end = tl.load(offsets_ptr + expert), tl.load(offsets_ptr + expert + 1)
    acc = tl.zeros((BN,), tl.float32)
    for start in range(begin, end, BR):
        at = start + tl.arange(0, BR)
        rows = tl.load(order_ptr + at, mask=at < end, other=0).to(tl.int64)
        dy = tl.load(
            dy_ptr + rows[:, None] * N + ns[None, :],
            mask=(at[:, None] < end) & (ns[None, :] < N), other=0.0,
        )  # fmt: skip
        acc += tl.sum(dy.to(tl.float32), 0)
    where = db_ptr + expert.to(tl.int64) * N + ns
    tl.store(where, acc.to(db_ptr.dtype.element_ty), mask=ns < N)
