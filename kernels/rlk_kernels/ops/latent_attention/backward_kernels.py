"""The gradient of latent attention in Triton: no atomics, every sum in a fixed order.

    p = exp(scale q.k - lse)     dp = do.c     delta = sum_l out do     ds = scale p (dp - delta)
    dq = sum_keys ds k           one program per block of rows, keys front to back
    dlatents = sum_rows ds q + p do    one program per block of keys and group of heads: rows of
                                 queries front to back; then the groups are added up

with k = (c, r), a latent and its rotated features. Accumulators are fp32; p and ds are rounded to
the input's dtype before their products. Names as in `kernels.py`; HG = heads of a group.
"""

import triton
import triton.language as tl

from rlk_kernels.ops.attention.order import find_sequence
from rlk_kernels.ops.latent_attention.kernels import load_rows, scores


@triton.jit(do_not_specialize=["T"])
def delta_kernel(
    out_ptr, do_ptr, delta_ptr, T, H: tl.constexpr, L: tl.constexpr, LP: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live, cols = row < T * H, tl.arange(0, LP)
    out = load_rows(out_ptr + row * L, live, cols, L, LP).to(tl.float32)
    do = load_rows(do_ptr + row * L, live, cols, L, LP).to(tl.float32)
    tl.store(delta_ptr + row % H * T + row // H, tl.sum(out * do, 1), mask=live)


@triton.jit
def _row_scalars(lse_ptr, delta_ptr, token, head, live, T):
    """(lse in powers of two, delta) of rows."""
    at = head.to(tl.int64) * T + token
    lse = tl.load(lse_ptr + at, mask=live, other=0.0)
    lse = tl.where(lse == float("-inf"), 0.0, lse * 1.4426950408889634)
    return lse, tl.load(delta_ptr + at, mask=live, other=0.0)


@triton.jit(do_not_specialize=["B", "T"])
def queries_kernel(
    q_ptr, c_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, cu_q_ptr, cu_k_ptr, B, T, scale_log2, scale,
    stride_qt, stride_qh, stride_s,
    H: tl.constexpr, L: tl.constexpr, LP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    b, q_start, len_q, first_row = find_sequence(cu_q_ptr, block, B, H, BM)
    if first_row >= len_q * H:
        return
    k_start = tl.load(cu_k_ptr + b)
    len_k = tl.load(cu_k_ptr + b + 1) - k_start
    cols, cols_r = tl.arange(0, LP), tl.arange(0, RP)
    row = first_row + tl.arange(0, BM)
    token, head, live = (q_start + row // H).to(tl.int64), row % H, row < len_q * H
    last = row // H + len_k - len_q
    at = token * stride_qt + head.to(tl.int64) * stride_qh
    q = load_rows(q_ptr + at, live, cols, L, LP)
    q_r = load_rows(q_ptr + L + at, live, cols_r, R, RP)
    do = load_rows(do_ptr + (token * H + head) * L, live, cols, L, LP)
    lse, delta = _row_scalars(lse_ptr, delta_ptr, token, head, live, T)
    last_row = tl.minimum(first_row + BM, len_q * H) - 1
    dq = tl.zeros((BM, LP), tl.float32)
    dq_r = tl.zeros((BM, RP), tl.float32)
    for first in range(0, tl.maximum(last_row // H + len_k - len_q + 1, 0), BN):
        key = first + tl.arange(0, BN)
        there = key < len_k
        key_at = (k_start + key).to(tl.int64) * stride_s
        c = load_rows(c_ptr + key_at, there, cols, L, LP)
        r = load_rows(c_ptr + L + key_at, there, cols_r, R, RP)
        visible = live[:, None] & (key[None, :] <= last[:, None]) & there[None, :]
        p = tl.exp2(scores(q, q_r, c, r) * scale_log2 - lse[:, None])
        dp = tl.dot(do, c.T, input_precision="ieee")
        ds = tl.where(visible, p * (dp - delta[:, None]) * scale, 0.0).to(c.dtype)
        dq = tl.dot(ds, c, dq, input_precision="ieee")
        dq_r = tl.dot(ds, r, dq_r, input_precision="ieee")
    at = dq_ptr + ((token * H + head) * (L + R))[:, None]
    dtype = dq_ptr.dtype.element_ty
    tl.store(at + cols[None, :], dq.to(dtype), mask=live[:, None] & (cols[None, :] < L))
    tl.store(at + L + cols_r[None, :], dq_r.to(dtype), mask=live[:, None] & (cols_r[None, :] < R))


@triton.jit
def _group_rows(row, q_start, len_q, group, H: tl.constexpr, HG: tl.constexpr):
    """(token, head, whether there is one) of packed rows of a group of heads."""
    query, head = row // HG, group * HG + row % HG
    return (q_start + query).to(tl.int64), head, (query < len_q) & (head < H)


@triton.jit(do_not_specialize=["B", "T", "S"])
def latents_kernel(
    q_ptr, c_ptr, do_ptr, lse_ptr, delta_ptr, parts_ptr, cu_q_ptr, cu_k_ptr, B, T, S, scale_log2,
    scale, stride_qt, stride_qh, stride_s,
    H: tl.constexpr, HG: tl.constexpr, L: tl.constexpr, LP: tl.constexpr, R: tl.constexpr,
    RP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """parts[group, S, L + R]: the sums over the rows of a group of heads. ALIGNED: rows of q and do
    begin at multiples of 16 bytes."""
    b, k_start, len_k, first_key = find_sequence(cu_k_ptr, tl.program_id(0), B, 1, BN)
    if first_key >= len_k:
        return
    group = tl.program_id(1)
    q_start = tl.load(cu_q_ptr + b)
    len_q = tl.load(cu_q_ptr + b + 1) - q_start
    cols, cols_r = tl.arange(0, LP), tl.arange(0, RP)
    key = first_key + tl.arange(0, BN)
    there = key < len_k
    slot = (k_start + key).to(tl.int64)
    c = load_rows(c_ptr + slot * stride_s, there, cols, L, LP)
    r = load_rows(c_ptr + L + slot * stride_s, there, cols_r, R, RP)
    begin = tl.maximum(first_key - (len_k - len_q), 0) * HG // BM * BM
    # Gradients and queries are one tile, row 2 i and row 2 i + 1 of it, so that each sum is of one
    # product: two products with one accumulator of this size would wait for each other.
    pair = tl.arange(0, 2 * BM)
    d_c = tl.zeros((BN, LP), tl.float32)
    d_r = tl.zeros((BN, RP), tl.float32)
    for first in range(begin, len_q * HG, BM):
        token, head, live = _group_rows(first + pair // 2, q_start, len_q, group, H, HG)
        do_at = do_ptr + (token * H + head) * L
        q_at = q_ptr + token * stride_qt + head.to(tl.int64) * stride_qh
        both_at = tl.where(pair % 2 == 0, do_at, q_at)
        if ALIGNED:
            both_at = tl.multiple_of(both_at, 16)
        both = load_rows(both_at, live, cols, L, LP)
        row = first + tl.arange(0, BM)
        token, head, live = _group_rows(row, q_start, len_q, group, H, HG)
        at = token * stride_qt + head.to(tl.int64) * stride_qh
        q_r = load_rows(q_ptr + L + at, live, cols_r, R, RP)
        lse, delta = _row_scalars(lse_ptr, delta_ptr, token, head, live, T)
        last = row // HG + len_k - len_q
        visible = (key[:, None] <= last[None, :]) & live[None, :] & there[:, None]
        products = tl.dot(c, both.T, input_precision="ieee")
        dp, s = tl.split(tl.reshape(products, (BN, BM, 2)))
        s = tl.dot(r, q_r.T, s, input_precision="ieee")
        p = tl.where(visible, tl.exp2(s * scale_log2 - lse[None, :]), 0.0)
        ds = (p * (dp - delta[None, :]) * scale).to(q_r.dtype)
        weights = tl.reshape(tl.join(p.to(q_r.dtype), ds), (BN, 2 * BM))
        d_c = tl.dot(weights, both, d_c, input_precision="ieee")
        d_r = tl.dot(ds, q_r, d_r, input_precision="ieee")
    at = parts_ptr + ((group.to(tl.int64) * S + slot) * (L + R))[:, None]
    tl.store(at + cols[None, :], d_c, mask=there[:, None] & (cols[None, :] < L))
    tl.store(at + L + cols_r[None, :], d_r, mask=there[:, None] & (cols_r[None, :] < R))
