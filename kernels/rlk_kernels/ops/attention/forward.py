"""The Triton forward of `attention` and `paged_attention`: one kernel body for both.

The order of a row's sums is in `order.py`; on Hopper `hopper.py` does the same
with another schedule, where it can read the keys and values.

Rows are packed: the G query heads that share a KV head lie side by side, row = query * G + head,
so that a decode step reads its keys once.

T = queries  S = keys  D = head size  BM = packed rows of a program  BN = keys of a block
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rlk_kernels.device import facts
from rlk_kernels.ops.attention.order import (
    CHUNK,
    LOG2E,
    block_n,
    block_weights,
    find_sequence,
    finish,
    merge,
    one_sum,
    seen_keys,
)


@triton.jit
def _load_keys(
    ptr, desc, table_ptr, key, first, k_start, len_k, hk, stride_page, stride_s, stride_h, cols,
    BN: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr, PAGED: tl.constexpr,
    PAGE: tl.constexpr, TMA: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """[BN, DP] of keys or values from key `first` on; zeros behind the sequence where CHECK."""
    if TMA:
        x = tl.reshape(desc.load([k_start + first, hk, 0]), (BN, DP))
        if CHECK:
            x = tl.where(key[:, None] < len_k, x, 0.0).to(x.dtype)
    else:
        if PAGED:
            page = tl.load(table_ptr + key // PAGE, mask=key < len_k, other=0).to(tl.int64)
            at = page * stride_page + (key % PAGE) * stride_s
        else:
            at = (k_start + key).to(tl.int64) * stride_s
        at = ptr + at[:, None] + hk * stride_h + cols[None, :]
        if CHECK:
            x = tl.load(at, mask=(key[:, None] < len_k) & (cols[None, :] < DIM), other=0.0)
        elif DIM == DP:
            x = tl.load(at)
        else:
            x = tl.load(at, mask=cols[None, :] < DIM, other=0.0)
    return x


@triton.jit
def attend_block(q, k, v, m, den, acc, scale, visible, MASKED: tl.constexpr, LEVELS: tl.constexpr):
    """One block of keys added to a chunk's state."""
    s = tl.dot(q, k.T, input_precision="ieee")
    if MASKED:
        s = tl.where(visible, s, float("-inf"))
    p, top, old, sums = block_weights(s, m, scale, LEVELS)
    den = tl.fma(den, old[:, None], sums)
    acc = acc * old[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return top, den, acc


@triton.jit(do_not_specialize=["B", "T", "window", "stride_table"])
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, k_desc, v_desc, out_ptr, lse_ptr, part_acc_ptr, part_ml_ptr,
    cu_q_ptr, cu_k_ptr, table_ptr, B, T, scale, window,
    stride_qt, stride_qh, stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh,
    stride_table,
    HK: tl.constexpr, G: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr, TMA: tl.constexpr,
    SPLIT: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first
    hk = tl.program_id(1)
    b, q_start, len_q, first_row = find_sequence(cu_q_ptr, block, B, G, BM)
    if first_row >= len_q * G:
        return
    if PAGED:
        k_start = 0
        len_k = tl.load(cu_k_ptr + b)
    else:
        k_start = tl.load(cu_k_ptr + b)
        len_k = tl.load(cu_k_ptr + b + 1) - k_start
    table = table_ptr + b.to(tl.int64) * stride_table

    row = first_row + tl.arange(0, BM)
    query = row // G
    head = hk * G + row % G
    live = row < len_q * G
    cols = tl.arange(0, DP)
    at = (q_start + query).to(tl.int64)[:, None] * stride_qt + head[:, None] * stride_qh
    q = tl.load(q_ptr + at + cols[None, :], mask=live[:, None] & (cols[None, :] < DIM), other=0.0)

    last = len_k - 1 + tl.zeros_like(row)  # the last key a row sees
    if CAUSAL:
        last = query + len_k - len_q
    begin, shared_end, seen_end = seen_keys(
        first_row, len_q, len_k, window, G, BM, BN, CAUSAL, WINDOWED
    )
    if SPLIT:
        chunk = tl.program_id(2)
        begin = tl.maximum(begin, chunk * CHUNK)
        seen_end = tl.minimum(seen_end, chunk * CHUNK + CHUNK)
        if begin >= seen_end:
            return
    plain_end = tl.maximum(tl.minimum(shared_end, seen_end) // BN * BN, begin)

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
            m, den, acc = attend_block(q, k, v, m, den, acc, scale, True, False, LEVELS)
        if not SPLIT and plain_end >= chunk_end:
            m_all, den_all, acc_all = merge(m_all, den_all, acc_all, m, one_sum(den), acc)
            m = tl.full((BM,), float("-inf"), tl.float32)
            den = tl.zeros((BM, 8), tl.float32)
            acc = tl.zeros((BM, DP), tl.float32)
    for first in range(plain_end, seen_end, BN):
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
        m, den, acc = attend_block(q, k, v, m, den, acc, scale, visible, True, LEVELS)
        if not SPLIT and (first + BN) % CHUNK == 0:
            m_all, den_all, acc_all = merge(m_all, den_all, acc_all, m, one_sum(den), acc)
            m = tl.full((BM,), float("-inf"), tl.float32)
            den = tl.zeros((BM, 8), tl.float32)
            acc = tl.zeros((BM, DP), tl.float32)

    packed = (q_start * G).to(tl.int64) + row
    if SPLIT:
        place = (tl.program_id(2).to(tl.int64) * HK + hk) * T * G + packed
        tl.store(part_ml_ptr + place * 2, m, mask=live)
        tl.store(part_ml_ptr + place * 2 + 1, one_sum(den), mask=live)
        tl.store(part_acc_ptr + place[:, None] * DP + cols[None, :], acc, mask=live[:, None])
    else:
        m_all, den_all, acc_all = merge(m_all, den_all, acc_all, m, one_sum(den), acc)
        finish(
            m_all, den_all, acc_all, out_ptr, lse_ptr, q_start + query, head, live, cols,
            HK * G, DIM, T,
        )  # fmt: skip


@triton.jit(do_not_specialize=["B", "T", "window"])
def _merge_kernel(
    part_acc_ptr, part_ml_ptr, out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, B, T, window,
    HK: tl.constexpr, G: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
    CHUNK: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """Merge the chunks of one packed row (query * G + head) of one KV head, front to back."""
    packed = tl.program_id(0).to(tl.int64)
    hk = tl.program_id(1)
    token = packed // G
    low = 0
    high = B
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_q_ptr + middle) <= token:
            low = middle
        else:
            high = middle
    q_start = tl.load(cu_q_ptr + low)
    len_k = tl.load(cu_k_ptr + low)
    if not PAGED:
        len_k = tl.load(cu_k_ptr + low + 1) - len_k
    end = len_k
    begin = 0
    if CAUSAL:
        len_q = tl.load(cu_q_ptr + low + 1) - q_start
        end = tl.maximum(token - q_start + len_k - len_q + 1, 0).to(tl.int32)
    if WINDOWED:
        begin = tl.maximum(end - window, 0)
    cols = tl.arange(0, DP)
    m = tl.full((1,), float("-inf"), tl.float32)
    den = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, DP), tl.float32)
    for chunk in range(begin // CHUNK, tl.cdiv(end, CHUNK)):
        place = ((tl.zeros((1,), tl.int64) + chunk) * HK + hk) * T * G + packed
        m_new = tl.load(part_ml_ptr + place * 2)
        den_new = tl.load(part_ml_ptr + place * 2 + 1)
        acc_new = tl.load(part_acc_ptr + place[:, None] * DP + cols[None, :])
        m, den, acc = merge(m, den, acc, m_new, den_new, acc_new)
    head = hk * G + (packed % G).to(tl.int32) + tl.zeros((1,), tl.int32)
    live = tl.full((1,), True, tl.int1)
    finish(m, den, acc, out_ptr, lse_ptr, token + tl.zeros((1,), tl.int64), head, live, cols,
            HK * G, DIM, T)  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, lens_k: Tensor, table: Tensor | None,
    causal: bool, scale: float, window: int | None,
    rows: int | None = None, split: bool | None = None, warp_specialized: bool | None = None,
) -> tuple[Tensor, Tensor, str]:  # fmt: skip
    """(out[T, Hq, D], lse[Hq, T], which implementation ran).

    `lens_k`: cu_seqlens_k, or context lengths with a `table`.

    `rows` (packed rows of a program), `split` and `warp_specialized` (copies in a warp of their
    own, `hopper.py`) change the time and never the bits; None leaves them to the shape.
    """
    tokens, heads, dim = q.shape
    paged = table is not None
    kv_heads = k.shape[-2]
    group = heads // kv_heads
    out = torch.empty(tokens, heads, dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    batch = cu_q.numel() - 1
    if tokens == 0 or batch == 0:
        return out, lse, "triton"
    padded = max(16, triton.next_power_of_2(dim))
    keys = table.shape[1] * k.shape[1] if table is not None else k.shape[0]
    chunks = max(1, triton.cdiv(keys, CHUNK))
    few = tokens * group <= 64 * batch
    if split is None:
        split = chunks > 1 and few
    part_acc = part_ml = lse
    if split:
        slots = chunks * kv_heads * tokens * group
        part_acc = torch.empty(slots, padded, dtype=torch.float32, device=q.device)
        part_ml = torch.empty(slots, 2, dtype=torch.float32, device=q.device)
    bn = block_n(dim, q.dtype)
    if warp_specialized is None:
        warp_specialized = rows is None and bn == 128 and facts(q.device).gluon
    done = False
    if warp_specialized:
        from rlk_kernels.ops.attention.hopper import attend_hopper

        groups = rows // 64 if rows else 1 if few else 2
        done = attend_hopper(
            q, k, v, out, lse, part_acc, part_ml, cu_q, lens_k, table, causal, scale, window,
            groups, split,
        )  # fmt: skip
    if not done:
        if rows is None:
            rows = 16 if tokens * group <= 16 * batch and q.dtype != torch.float32 else 64
        tma = (
            not paged and facts(q.device).tma and q.dtype != torch.float32
            and all(x.data_ptr() % 16 == 0 and x.stride(2) == 1 for x in (k, v))
            and all(x.stride(i) * x.element_size() % 16 == 0 for x in (k, v) for i in (0, 1))
            and k.shape[0] > 0
        )  # fmt: skip
        box = [bn, 1, padded]
        stages = 3 if bn == 64 and padded <= 128 and rows > 16 else 2
        k_strides = k.stride()[:3] if paged else (0, *k.stride()[:2])
        v_strides = v.stride()[:3] if paged else (0, *v.stride()[:2])
        blocks = (tokens * group) // rows + batch
        _attention_kernel[(blocks, kv_heads, chunks if split else 1)](
            q, k, v, TensorDescriptor.from_tensor(k, box) if tma else k,
            TensorDescriptor.from_tensor(v, box) if tma else v, out, lse, part_acc, part_ml,
            cu_q, lens_k, table if table is not None else cu_q, batch, tokens,
            scale * LOG2E, window or 0, q.stride(0), q.stride(1), *k_strides, *v_strides,
            table.stride(0) if table is not None else 0,
            kv_heads, group, dim, padded, rows, bn, CHUNK, causal, window is not None,
            paged, k.shape[1] if paged else 1, tma, split, bn.bit_length() - 4,
            num_warps=8 if rows == 128 or (rows > 16 and bn == 128) else 4,
            num_stages=1 if q.dtype == torch.float32 else stages,
            # four programs a processor hide the latency of the gathers of a decode step
            maxnreg=128 if rows == 16 and bn == 64 and padded <= 128 else None,
        )  # fmt: skip
    if split:
        _merge_kernel[(tokens * group, kv_heads)](
            part_acc, part_ml, out, lse, cu_q, lens_k, batch, tokens, window or 0,
            kv_heads, group, dim, padded, bn, CHUNK, causal, window is not None, paged,
            num_warps=1,
        )  # fmt: skip
    return out, lse, "triton/hopper" if done else "triton"
