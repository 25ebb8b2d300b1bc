"""The forward kernels of latent attention in Triton.

Order of a row (one query of one head): that of `attention/order.py`, with chunks of CHUNK keys and
blocks of `block_n` keys. The score of a key is the product of the rotated features, to which that
of the latents is added. An accumulator of 64 rows and 512 features is half of the registers of a
processor, so the sum of the merged chunks is in memory while a chunk is computed.

T = queries  H = heads  L = features of a latent  R = rotated features  BM = packed rows of a
program, row = query * H + head  BN = keys of a block
"""

import torch
import triton
import triton.language as tl

from rlk_kernels.device import interpreting
from rlk_kernels.ops.attention.order import (
    block_weights,
    find_sequence,
    finish,
    merge,
    one_sum,
)

CHUNK = 512
"""Keys of a chunk: the unit of parallel decode, and part of the order of the sum."""


def block_n(dtype: torch.dtype) -> int:
    """Keys of a block: part of the order of the sum, so they never depend on the batch."""
    return 32 if interpreting() or dtype == torch.float32 else 64


@triton.jit
def load_rows(at, live, cols, DIM: tl.constexpr, DP: tl.constexpr):
    """[rows, DP] of features `cols` of the rows that begin at `at`; zeros where not `live`."""
    if DIM == DP:
        return tl.load(at[:, None] + cols[None, :], mask=live[:, None], other=0.0)
    mask = live[:, None] & (cols[None, :] < DIM)
    return tl.load(at[:, None] + cols[None, :], mask=mask, other=0.0)


@triton.jit
def scores(q, q_r, c, r):
    """q.c + q_r.r, fp32 [rows of q, rows of c]."""
    s = tl.dot(q_r, r.T, input_precision="ieee")
    return tl.dot(q, c.T, s, input_precision="ieee")


@triton.jit
def _key_rows(key, k_start, len_k, table_ptr, stride_page, stride_s, PAGED: tl.constexpr,
              PAGE: tl.constexpr):  # fmt: skip
    """Where the rows of keys begin."""
    if PAGED:
        page = tl.load(table_ptr + key // PAGE, mask=key < len_k, other=0).to(tl.int64)
        return page * stride_page + (key % PAGE).to(tl.int64) * stride_s
    return (k_start + key).to(tl.int64) * stride_s


@triton.jit
def _chunk(
    q, q_r, c_ptr, table_ptr, k_start, len_k, last, first_key, end, scale, stride_page, stride_s,
    L: tl.constexpr, LP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """(maximum, sum, accumulator) of the keys first_key ... end of one chunk."""
    cols, cols_r = tl.arange(0, LP), tl.arange(0, RP)
    m = tl.full((BM,), float("-inf"), tl.float32)
    den = tl.zeros((BM, 8), tl.float32)
    acc = tl.zeros((BM, LP), tl.float32)
    for first in range(first_key, end, BN):
        key = first + tl.arange(0, BN)
        there = key < len_k
        at = _key_rows(key, k_start, len_k, table_ptr, stride_page, stride_s, PAGED, PAGE)
        c = load_rows(c_ptr + at, there, cols, L, LP)
        r = load_rows(c_ptr + L + at, there, cols_r, R, RP)
        s = tl.where(
            (key[None, :] <= last[:, None]) & there[None, :], scores(q, q_r, c, r), float("-inf")
        )
        p, m, old, sums = block_weights(s, m, scale, LEVELS)
        den = tl.fma(den, old[:, None], sums)
        acc = tl.dot(p.to(c.dtype), c, acc * old[:, None], input_precision="ieee")
    return m, one_sum(den), acc


@triton.jit(do_not_specialize=["B", "capacity"])
def slots_kernel(
    cu_q_ptr, cu_k_ptr, base_ptr, B, capacity, H: tl.constexpr, CHUNK: tl.constexpr,
    PAGED: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """base[b]: the first slot of the chunks of sequence b; -1 if one program has all its chunks,
    because it has one, or no slots are left for it."""
    b = tl.arange(0, BP)
    there = b < B
    queries = tl.load(cu_q_ptr + b + 1, mask=there, other=0)
    queries -= tl.load(cu_q_ptr + b, mask=there, other=0)
    keys = tl.load(cu_k_ptr + b, mask=there, other=0)
    if not PAGED:
        keys = tl.load(cu_k_ptr + b + 1, mask=there, other=0) - keys
    slots = tl.where(keys > CHUNK, tl.cdiv(keys, CHUNK) * queries * H, 0).to(tl.int64)
    end = tl.cumsum(slots, 0)
    fits = (slots > 0) & (end <= capacity)
    tl.store(base_ptr + b, tl.where(fits, end - slots, -1), mask=there)


@triton.jit(do_not_specialize=["B", "T", "blocks", "stride_table"])
def attend_kernel(
    q_ptr, c_ptr, out_ptr, lse_ptr, running_ptr, acc_ptr, ml_ptr, base_ptr, cu_q_ptr, cu_k_ptr,
    table_ptr, B, T, blocks, scale, stride_qt, stride_qh, stride_page, stride_s, stride_table,
    H: tl.constexpr, L: tl.constexpr, LP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr, PAGED: tl.constexpr,
    PAGE: tl.constexpr, SPLIT: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """BM packed rows over their keys, one block of rows after another. SPLIT: programs of axis 1
    divide the chunks of a sequence that has slots, and store them for `merge_kernel`."""
    cols, cols_r = tl.arange(0, LP), tl.arange(0, RP)
    within = tl.arange(0, BM)[:, None] * LP + cols[None, :]
    running = running_ptr + tl.program_id(0).to(tl.int64) * (BM * LP) + within
    for index in range(tl.program_id(0), blocks, tl.num_programs(0)):
        # the longest rows first
        b, q_start, len_q, first_row = find_sequence(cu_q_ptr, blocks - 1 - index, B, H, BM)
        rows = len_q * H
        k_start = 0
        len_k = tl.load(cu_k_ptr + b)
        if not PAGED:
            k_start = len_k
            len_k = tl.load(cu_k_ptr + b + 1) - k_start
        row = first_row + tl.arange(0, BM)
        query = row // H
        head = row % H
        live = row < rows
        last = query + len_k - len_q
        last_row = tl.minimum(first_row + BM, rows) - 1
        end = tl.maximum(last_row // H + len_k - len_q + 1, 0)
        base = tl.full((), -1, tl.int64)
        begin = 0
        step = 1
        if SPLIT:
            base = tl.load(base_ptr + b)
            begin = tl.program_id(1)
            step = tl.num_programs(1)
            if base < 0:
                begin = tl.where(begin == 0, 0, end)
                step = 1
        if first_row < rows:
            at = (q_start + query).to(tl.int64) * stride_qt + head.to(tl.int64) * stride_qh
            q = load_rows(q_ptr + at, live, cols, L, LP)
            q_r = load_rows(q_ptr + L + at, live, cols_r, R, RP)
            m_all = tl.full((BM,), float("-inf"), tl.float32)
            den_all = tl.zeros((BM,), tl.float32)
            chunks = tl.cdiv(end, CHUNK)
            table = table_ptr + b.to(tl.int64) * stride_table
            for chunk in range(begin, tl.maximum(chunks, 1), step):
                m, den, acc = _chunk(
                    q, q_r, c_ptr, table, k_start, len_k, last, chunk * CHUNK,
                    tl.minimum(end, chunk * CHUNK + CHUNK), scale, stride_page, stride_s, L, LP, R,
                    RP, BM, BN, PAGED, PAGE, LEVELS,
                )  # fmt: skip
                if base >= 0:
                    slot = base + chunk * rows + row
                    tl.store(ml_ptr + slot * 2, m, mask=live)
                    tl.store(ml_ptr + slot * 2 + 1, den, mask=live)
                    tl.store(acc_ptr + slot[:, None] * LP + cols[None, :], acc, mask=live[:, None])
                else:
                    before = tl.load(running, mask=live[:, None] & (chunk > 0), other=0.0)
                    m_all, den_all, acc = merge(m_all, den_all, before, m, den, acc)
                    if chunk + 1 < chunks:
                        tl.store(running, acc, mask=live[:, None])
                        tl.debug_barrier()
                    else:
                        finish(
                            m_all, den_all, acc, out_ptr, lse_ptr, q_start + query, head, live,
                            cols, H, L, T,
                        )  # fmt: skip


@triton.jit(do_not_specialize=["B", "T"])
def merge_kernel(
    out_ptr, lse_ptr, acc_ptr, ml_ptr, base_ptr, cu_q_ptr, cu_k_ptr, B, T, H: tl.constexpr,
    L: tl.constexpr, LP: tl.constexpr, CHUNK: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """Merge the chunks of a row, from front to back."""
    b, q_start, len_q, query = find_sequence(cu_q_ptr, tl.program_id(0), B, 1, 1)
    base = tl.load(base_ptr + b)
    if (query < len_q) & (base >= 0):
        len_k = tl.load(cu_k_ptr + b)
        if not PAGED:
            len_k = tl.load(cu_k_ptr + b + 1) - len_k
        cols = tl.arange(0, LP)
        row = query * H + tl.program_id(1) + tl.zeros((1,), tl.int32)
        m = tl.full((1,), float("-inf"), tl.float32)
        den = tl.zeros((1,), tl.float32)
        acc = tl.zeros((1, LP), tl.float32)
        for chunk in range(0, tl.cdiv(tl.maximum(query + len_k - len_q + 1, 0), CHUNK)):
            slot = base + chunk * (len_q * H) + row
            part = tl.load(acc_ptr + slot[:, None] * LP + cols[None, :])
            m, den, acc = merge(
                m, den, acc, tl.load(ml_ptr + slot * 2), tl.load(ml_ptr + slot * 2 + 1), part
            )
        finish(m, den, acc, out_ptr, lse_ptr, q_start + row // H, row % H, row >= 0, cols, H, L, T)
