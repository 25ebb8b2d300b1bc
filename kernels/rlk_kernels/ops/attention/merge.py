"""Merging the chunks that pieces of work left behind (`schedule.py`), front to back.

Whoever ends the last piece of some rows merges them. Who that is differs from run to run; what is
merged, and in which order, does not.
"""

import triton
import triton.language as tl

from rlk_kernels.ops.attention.order import finish, merge
from rlk_kernels.ops.attention.schedule import (
    BASE,
    COUNT,
    FIRST,
    LEADER,
    MEMBERS,
    TAU,
    _ranges,
    slot_row,
)

ROWS_MERGED = tl.constexpr(16)
"""Rows that are merged at a time (time only)."""


@triton.jit
def _slot(
    part_acc_ptr, part_ml_ptr, base, rows, row, folded, chunk, begin, end, hk, cols,
    HK: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """(m, den, acc) that the chunk left behind; nothing for rows whose chunks end before it."""
    there = (chunk >= begin) & (chunk < end)
    place = slot_row(base, chunk, folded, rows, row, HK, hk)
    m = tl.load(part_ml_ptr + place * 2, mask=there, other=float("-inf"))
    den = tl.load(part_ml_ptr + place * 2 + 1, mask=there, other=0.0)
    acc = tl.load(
        part_acc_ptr + place[:, None] * DP + cols[None, :], mask=there[:, None], other=0.0
    )
    return m, den, acc


@triton.jit
def _merge_slots(
    m, den, acc, part_acc_ptr, part_ml_ptr, base, rows, row, folded, begin, end, hk, cols,
    HK: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """(m, den, acc) and each row's chunks begin ... end, those up to `folded` in one state."""
    end = tl.maximum(end, tl.where(end > begin, folded + 1, 0))
    begin = tl.maximum(begin, folded)
    for chunk in range(tl.min(begin, 0), tl.max(end, 0), 4):
        # all four are on their way before the first is merged
        m0, den0, acc0 = _slot(
            part_acc_ptr, part_ml_ptr, base, rows, row, folded, chunk, begin, end, hk, cols, HK, DP
        )
        m1, den1, acc1 = _slot(
            part_acc_ptr, part_ml_ptr, base, rows, row, folded, chunk + 1, begin, end, hk, cols, HK,
            DP,
        )  # fmt: skip
        m2, den2, acc2 = _slot(
            part_acc_ptr, part_ml_ptr, base, rows, row, folded, chunk + 2, begin, end, hk, cols, HK,
            DP,
        )  # fmt: skip
        m3, den3, acc3 = _slot(
            part_acc_ptr, part_ml_ptr, base, rows, row, folded, chunk + 3, begin, end, hk, cols, HK,
            DP,
        )  # fmt: skip
        m, den, acc = merge(m, den, acc, m0, den0, acc0)
        m, den, acc = merge(m, den, acc, m1, den1, acc1)
        m, den, acc = merge(m, den, acc, m2, den2, acc2)
        m, den, acc = merge(m, den, acc, m3, den3, acc3)
    return m, den, acc


@triton.jit
def merge_rows(
    m, den, acc, plan_ptr, part_acc_ptr, part_ml_ptr, out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, b, row,
    cols, hk, B, T, window, HK: tl.constexpr, G: tl.constexpr, DIM: tl.constexpr,
    DP: tl.constexpr, CHUNK: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    PAGED: tl.constexpr,
):  # fmt: skip
    """Write the packed rows row[R] of sequence b, or of the prefix that b shares, all of whose
    pieces have ended; (m, den, acc) are of no chunk."""
    pitch = 2 * B + 2
    leader = tl.load(plan_ptr + LEADER * pitch + b)
    # rows of a prefix: the queries of its members, one after another
    queries = tl.load(cu_q_ptr + b + 1) - tl.load(cu_q_ptr + b)
    lead = b
    if leader >= 0:
        queries = tl.load(plan_ptr + MEMBERS * pitch + leader)
        lead = leader
    live = row < queries * G
    if tl.min(row, 0) < queries * G:
        member = tl.where((leader >= 0) & live, row // G, 0)
        row = tl.where(live, row, 0)
        _merge_live(
            m, den, acc, plan_ptr, part_acc_ptr, part_ml_ptr, out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr,
            leader, lead + member, queries * G, row, row - member * G, live, cols, hk, B, T, window,
            HK, G, DIM, DP, CHUNK, CAUSAL, WINDOWED, PAGED,
        )  # fmt: skip


@triton.jit
def _merge_live(
    m, den, acc, plan_ptr, part_acc_ptr, part_ml_ptr, out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, leader,
    sequence, rows, row, own_row, live, cols, hk, B, T, window, HK: tl.constexpr, G: tl.constexpr,
    DIM: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """`merge_rows` of own_row[R] of sequence[R], which are row[R] of `rows` in the pieces."""
    pitch = 2 * B + 2
    tau = tl.load(plan_ptr + TAU * pitch)
    q_start = tl.load(cu_q_ptr + sequence)
    queries = tl.load(cu_q_ptr + sequence + 1) - q_start
    end = tl.load(cu_k_ptr + sequence)
    if not PAGED:
        end = tl.load(cu_k_ptr + sequence + 1) - end
    if CAUSAL:
        end = tl.maximum(own_row // G + end - queries + 1, 0)
    begin = end * 0
    if WINDOWED:
        begin = tl.maximum(end - window, 0) // CHUNK
    end = tl.where(live, tl.cdiv(end, CHUNK), 0)
    own = plan_ptr + 2 * sequence + 1
    first = tl.load(own + FIRST * pitch)
    base = tl.load(own + BASE * pitch)
    _, own_length = _ranges(tl.load(own + COUNT * pitch), tau)
    folded = first + own_length - 1
    if leader >= 0:
        at = plan_ptr + 2 * leader
        _prefix_ranges, length = _ranges(tl.load(at + COUNT * pitch), tau)
        m, den, acc = _merge_slots(
            m, den, acc, part_acc_ptr, part_ml_ptr, tl.load(at + BASE * pitch), rows, row,
            row * 0 + length - 1, begin, tl.where(live, first, 0), hk, cols, HK, DP,
        )  # fmt: skip
        folded = first
        begin = first
    m, den, acc = _merge_slots(
        m, den, acc, part_acc_ptr, part_ml_ptr, base, queries * G, own_row, folded, begin, end, hk,
        cols, HK, DP,
    )  # fmt: skip
    token, head = q_start + own_row // G, hk * G + own_row % G
    finish(m, den, acc, out_ptr, lse_ptr, token, head, live, cols, HK * G, DIM, T)
