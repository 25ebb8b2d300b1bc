"""The kernel of attention and paged attention in plain Triton, with one body for both.

`order.py` describes the order of a row's sums. On Hopper `hopper/steps.py` has the same order with
another schedule, for keys and values that it can read.

Rows are packed: the G query heads that share a KV head are adjacent, row = query * G + head, so
that a decode step reads its keys once.

T = queries  S = keys  D = head size  BM = packed rows of a program  BN = keys of a block
"""

import triton
import triton.language as tl

from rlk_kernels.ops.attention.order import (
    block_weights,
    capped,
    find_sequence,
    finish,
    merge,
    one_sum,
    visible_keys,
)
from rlk_kernels.ops.attention.schedule import lone_piece, lone_sequence, piece, slot_row
from rlk_kernels.ops.overlap import begin_overlapped


@triton.jit
def _load_keys(
    ptr, desc, table_ptr, key, first, k_start, len_k, hk, stride_page, stride_s, stride_h, cols,
    BN: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr, PAGED: tl.constexpr,
    PAGE: tl.constexpr, TMA: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """[BN, DP] of keys or values from key `first` on; CHECK: zeros after the end of the
    sequence."""
    if TMA:
        x = tl.reshape(desc.load([k_start + first, hk, 0]), (BN, DP))
        if CHECK:
            x = tl.where(key[:, None] < len_k, x, 0.0).to(x.dtype)
    else:
        if PAGED:
            page = tl.load(table_ptr + key // PAGE, mask=key < len_k, other=0).to(tl.int64)
            at = page * stride_page + (key % PAGE).to(tl.int64) * stride_s
        else:
            at = (k_start + key).to(tl.int64) * stride_s
        at = ptr + at[:, None] + hk.to(tl.int64) * stride_h + cols[None, :]
        if CHECK:
            x = tl.load(at, mask=(key[:, None] < len_k) & (cols[None, :] < DIM), other=0.0)
        elif DIM == DP:
            x = tl.load(at)
        else:
            x = tl.load(at, mask=cols[None, :] < DIM, other=0.0)
    return x


@triton.jit
def _add_block(
    q, k, v, m, den, acc, scale, bend, visible, MASKED: tl.constexpr, CAPPED: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """Add one block of keys to the state of a chunk."""
    s = tl.dot(q, k.T, input_precision="ieee")
    if CAPPED:
        s = capped(s, bend)
    if MASKED:
        s = tl.where(visible, s, float("-inf"))
    p, top, old, sums = block_weights(s, m, scale, LEVELS)
    den = tl.fma(den, old[:, None], sums)
    acc = acc * old[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return top, den, acc


@triton.jit
def _attend_rows(
    q_ptr, k_ptr, v_ptr, k_desc, v_desc, out_ptr, lse_ptr, part_acc_ptr, part_ml_ptr, table_ptr,
    b, q_start, len_q, k_start, len_k, first_row, hk, T, scale, bend, window,
    first_chunk, chunk_limit, only, merges, folded, base,
    stride_qt, stride_qh, stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh,
    stride_table,
    HK: tl.constexpr, G: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr, TMA: tl.constexpr,
    SPLIT: tl.constexpr, CAPPED: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """BM packed rows of a sequence over its keys, or with SPLIT over the chunks of a piece."""
    table = table_ptr + b.to(tl.int64) * stride_table
    row = first_row + tl.arange(0, BM)
    query = row // G
    head = hk * G + row % G
    live = row < len_q * G
    cols = tl.arange(0, DP)
    at = (q_start + query).to(tl.int64) * stride_qt + head.to(tl.int64) * stride_qh
    at = q_ptr + at[:, None] + cols[None, :]
    q = tl.load(at, mask=live[:, None] & (cols[None, :] < DIM), other=0.0)

    last = len_k - 1 + tl.zeros_like(row)  # the last key a row sees
    if CAUSAL:
        last = query + len_k - len_q
    begin, shared_end, visible_end = visible_keys(
        first_row, len_q, len_k, window, G, BM, BN, CAUSAL, WINDOWED
    )
    if SPLIT:
        begin = tl.maximum(begin, first_chunk * CHUNK)
        visible_end = tl.minimum(visible_end, chunk_limit * CHUNK)
    plain_end = tl.maximum(tl.minimum(shared_end, visible_end) // BN * BN, begin)

    m = tl.full((BM,), float("-inf"), tl.float32)
    den = tl.zeros((BM, 8), tl.float32)
    acc = tl.zeros((BM, DP), tl.float32)
    m_all = m
    den_all = tl.zeros((BM,), tl.float32)
    acc_all = acc
    for chunk in range(begin // CHUNK, tl.cdiv(plain_end, CHUNK)):
        chunk_end = chunk * CHUNK + CHUNK
        for first in range(tl.maximum(begin, chunk * CHUNK), tl.minimum(plain_end, chunk_end), BN):
            key = first + tl.arange(0, BN)
            k = _load_keys(
                k_ptr, k_desc, table, key, first, k_start, len_k, hk,
                stride_kp, stride_ks, stride_kh, cols, BN, DIM, DP, PAGED, PAGE, TMA, False,
            )  # fmt: skip
            v = _load_keys(
                v_ptr, v_desc, table, key, first, k_start, len_k, hk,
                stride_vp, stride_vs, stride_vh, cols, BN, DIM, DP, PAGED, PAGE, TMA, False,
            )  # fmt: skip
            m, den, acc = _add_block(q, k, v, m, den, acc, scale, bend, True, False, CAPPED, LEVELS)
        if plain_end >= chunk_end:
            m_all, den_all, acc_all = _end_chunk(
                m_all, den_all, acc_all, m, den, acc, part_acc_ptr, part_ml_ptr, base, chunk,
                folded, merges, row, len_q * G, hk, live, cols, HK, DP, SPLIT,
            )  # fmt: skip
            m = tl.full((BM,), float("-inf"), tl.float32)
            den = tl.zeros((BM, 8), tl.float32)
            acc = tl.zeros((BM, DP), tl.float32)
    for first in range(plain_end, visible_end, BN):
        key = first + tl.arange(0, BN)
        k = _load_keys(
            k_ptr, k_desc, table, key, first, k_start, len_k, hk, stride_kp, stride_ks, stride_kh,
            cols, BN, DIM, DP, PAGED, PAGE, TMA, True,
        )  # fmt: skip
        v = _load_keys(
            v_ptr, v_desc, table, key, first, k_start, len_k, hk, stride_vp, stride_vs, stride_vh,
            cols, BN, DIM, DP, PAGED, PAGE, TMA, True,
        )  # fmt: skip
        visible = (key[None, :] <= last[:, None]) & (key[None, :] < len_k)
        if WINDOWED:
            visible &= key[None, :] > last[:, None] - window
        m, den, acc = _add_block(q, k, v, m, den, acc, scale, bend, visible, True, CAPPED, LEVELS)
        if (first + BN) % CHUNK == 0:
            m_all, den_all, acc_all = _end_chunk(
                m_all, den_all, acc_all, m, den, acc, part_acc_ptr, part_ml_ptr, base,
                first // CHUNK, folded, merges, row, len_q * G, hk, live, cols, HK, DP, SPLIT,
            )  # fmt: skip
            m = tl.full((BM,), float("-inf"), tl.float32)
            den = tl.zeros((BM, 8), tl.float32)
            acc = tl.zeros((BM, DP), tl.float32)

    if SPLIT:
        if tl.cdiv(visible_end, BN) * BN % CHUNK > 0 and begin < visible_end:  # an open chunk
            m_all, den_all, acc_all = _end_chunk(
                m_all, den_all, acc_all, m, den, acc, part_acc_ptr, part_ml_ptr, base,
                visible_end // CHUNK, folded, merges, row, len_q * G, hk, live, cols, HK, DP, SPLIT,
            )  # fmt: skip
        if merges and not only:
            _store_state(
                m_all, den_all, acc_all, part_acc_ptr, part_ml_ptr, base, folded, folded, row,
                len_q * G, hk, live, cols, HK, DP,
            )  # fmt: skip
    else:
        m_all, den_all, acc_all = merge(m_all, den_all, acc_all, m, one_sum(den), acc)
    if only:
        finish(
            m_all, den_all, acc_all, out_ptr, lse_ptr, q_start + query, head, live, cols,
            HK * G, DIM, T,
        )  # fmt: skip


@triton.jit
def _store_state(
    m, den, acc, part_acc_ptr, part_ml_ptr, base, chunk, folded, row, rows, hk, live, cols,
    HK: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    slot = slot_row(base, chunk, folded, rows, row, HK, hk)
    tl.store(part_ml_ptr + slot * 2, m, mask=live)
    tl.store(part_ml_ptr + slot * 2 + 1, den, mask=live)
    tl.store(part_acc_ptr + slot[:, None] * DP + cols[None, :], acc, mask=live[:, None])


@triton.jit
def _end_chunk(
    m_all, den_all, acc_all, m, den, acc, part_acc_ptr, part_ml_ptr, base, chunk, folded, merges,
    row, rows, hk, live, cols, HK: tl.constexpr, DP: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Merge the state of a chunk with those before it, or store it for `merge.py`."""
    if not SPLIT or merges:
        m_all, den_all, acc_all = merge(m_all, den_all, acc_all, m, one_sum(den), acc)
    else:
        _store_state(
            m, one_sum(den), acc, part_acc_ptr, part_ml_ptr, base, chunk, folded, row, rows, hk,
            live, cols, HK, DP,
        )  # fmt: skip
    return m_all, den_all, acc_all


@triton.jit(do_not_specialize=["B", "T", "capacity", "target", "window", "stride_table"])
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, k_desc, v_desc, out_ptr, lse_ptr, part_acc_ptr, part_ml_ptr, plan_ptr,
    pieces_ptr, cu_q_ptr, cu_k_ptr, table_ptr, B, T, capacity, target, scale, bend, window,
    stride_qt, stride_qh, stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh,
    stride_table,
    HK: tl.constexpr, G: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr, TMA: tl.constexpr,
    SPLIT: tl.constexpr, LISTED: tl.constexpr, CAPPED: tl.constexpr, LEVELS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    begin_overlapped(OVERLAP)
    if SPLIT:
        if LISTED:
            total = tl.load(plan_ptr + 2 * B) * HK
        else:
            lone = lone_sequence(
                cu_q_ptr, cu_k_ptr, window, capacity, target, HK, G, BM, CHUNK, CAUSAL, WINDOWED,
                PAGED,
            )  # fmt: skip
            total = tl.cdiv(lone[1] * G, BM) * lone[6] * HK
        for index in range(tl.program_id(0), total, tl.num_programs(0)):
            hk = index % HK
            if LISTED:  # noqa: SIM108 (Triton compiles both sides of an expression)
                one = piece(pieces_ptr, index // HK)
            else:
                one = lone_piece(lone, index // HK, G, BM)
            b, q_start, len_q, k_start, len_k, row, begin, end, only, merges, folded, base = one
            _attend_rows(
                q_ptr, k_ptr, v_ptr, k_desc, v_desc, out_ptr, lse_ptr, part_acc_ptr, part_ml_ptr,
                table_ptr, b, q_start, len_q, k_start, len_k, row, hk, T, scale, bend, window,
                begin, end, only != 0, merges != 0, folded, base, stride_qt, stride_qh, stride_kp,
                stride_ks, stride_kh, stride_vp, stride_vs, stride_vh, stride_table, HK, G, DIM, DP,
                BM, BN, CHUNK, CAUSAL, WINDOWED, PAGED, PAGE, TMA, SPLIT, CAPPED, LEVELS,
            )  # fmt: skip
    else:
        block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first
        b, q_start, len_q, row = find_sequence(cu_q_ptr, block, B, G, BM)
        if row < len_q * G:
            k_start = 0
            len_k = tl.load(cu_k_ptr + b)
            if not PAGED:
                k_start = len_k
                len_k = tl.load(cu_k_ptr + b + 1) - k_start
            _attend_rows(
                q_ptr, k_ptr, v_ptr, k_desc, v_desc, out_ptr, lse_ptr, part_acc_ptr, part_ml_ptr,
                table_ptr, b, q_start, len_q, k_start, len_k, row, tl.program_id(1), T, scale,
                bend, window, 0, 0, True, True, 0, 0, stride_qt, stride_qh, stride_kp, stride_ks,
                stride_kh, stride_vp, stride_vs, stride_vh, stride_table, HK, G, DIM, DP, BM, BN,
                CHUNK, CAUSAL, WINDOWED, PAGED, PAGE, TMA, SPLIT, CAPPED, LEVELS,
            )  # fmt: skip
