"""The Triton backward of `attention`: no atomics, every sum in a fixed order.

    p = exp(scale q.k - lse)     dp = do.v     delta = sum_d out do     ds = p (dp - delta)
    dq = scale sum_keys ds k        one program per block of rows, keys front to back
    dv = sum_rows p do              one program per block of keys: blocks of ROWS queries front to
    dk = scale sum_rows ds q        back, in each of them the heads of the group one after another

With a softcap c: p = exp(c t - lse), t = tanh(scale q.k / c), and ds times 1 - t^2.

Accumulators are fp32; p and ds are rounded to the input's dtype before their products. A row of dq
depends on that row and its keys alone: blocks of keys are aligned to key 0, and a block that the
row does not see adds exact zeros. dk and dv depend on the positions of the queries in their
sequence, and on nothing outside of it. On Hopper `hopper/dq.py` and `hopper/dkv.py` replace the two
kernels here, with the same order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.device import facts, interpreting
from rlk_kernels.launching import cdiv, launch, power_of_2, shape_cache
from rlk_kernels.ops.attention.call import AttentionCall
from rlk_kernels.ops.attention.order import (
    attending_rows,
    block_n,
    capped,
    capped_scales,
    find_sequence,
)


@triton.jit
def _clear_outside(x_ptr, cu_ptr, B, row, at, mask):
    """Set rows outside every sequence to zero."""
    outside = (row < tl.load(cu_ptr)) | (row >= tl.load(cu_ptr + B))
    zero = tl.zeros(at.shape, x_ptr.dtype.element_ty)
    tl.store(x_ptr + at, zero, mask=mask & outside[:, None])


@triton.jit(do_not_specialize=["B", "T", "S"])
def _prepare_kernel(
    o_ptr, do_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, cu_q_ptr, cu_k_ptr, B, T, S,
    HQ: tl.constexpr, HK: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Compute delta, and set gradients outside every sequence to zero."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    head = tl.program_id(1)
    cols = tl.arange(0, DP)[None, :]
    at = (row.to(tl.int64) * HQ + head)[:, None] * DIM + cols
    mask = (row < T)[:, None] & (cols < DIM)
    o = tl.load(o_ptr + at, mask=mask, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(delta_ptr + head.to(tl.int64) * T + row, tl.sum(o * do, 1), mask=row < T)
    _clear_outside(dq_ptr, cu_q_ptr, B, row, at, mask)
    if head < HK:
        at = (row.to(tl.int64) * HK + head)[:, None] * DIM + cols
        mask = (row < S)[:, None] & (cols < DIM)
        _clear_outside(dk_ptr, cu_k_ptr, B, row, at, mask)
        _clear_outside(dv_ptr, cu_k_ptr, B, row, at, mask)


@triton.jit
def _weights(
    q, k, do, v, lse, delta, query, key, live, len_k, offset, window, scale, bend,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """(p, ds)[rows, keys], 0 where a row does not see a key."""
    visible = live[:, None] & (key[None, :] < len_k)
    if CAUSAL:
        visible &= key[None, :] <= query[:, None] + offset
    if WINDOWED:
        last = query + offset if CAUSAL else len_k - 1 + tl.zeros_like(query)
        visible &= key[None, :] > last[:, None] - window
    s = tl.dot(q, k.T, input_precision="ieee")
    if CAPPED:
        s = capped(s, bend)
    p = tl.where(visible, tl.exp2(s * scale - lse[:, None]), 0.0)
    dp = tl.dot(do, v.T, input_precision="ieee")
    ds = tl.where(visible, p * (dp - delta[:, None]), 0.0)
    if CAPPED:
        ds *= tl.fma(-s, s, 1.0)
    return p, ds


@triton.jit
def _load_rows(
    q_ptr, do_ptr, lse_ptr, delta_ptr, token, head, live, T, stride_t, stride_h, cols,
    HQ: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """(q, do, lse in powers of two, delta) of rows, each a head of a token."""
    mask = live[:, None] & (cols[None, :] < DIM)
    at = (token * stride_t + head.to(tl.int64) * stride_h)[:, None] + cols[None, :]
    q = tl.load(q_ptr + at, mask=mask, other=0.0)
    at = (token * HQ + head)[:, None] * DIM + cols[None, :]
    do = tl.load(do_ptr + at, mask=mask, other=0.0)
    lse = tl.load(lse_ptr + head.to(tl.int64) * T + token, mask=live, other=0.0)
    lse = tl.where(lse == float("-inf"), 0.0, lse * 1.4426950408889634)
    delta = tl.load(delta_ptr + head.to(tl.int64) * T + token, mask=live, other=0.0)
    return q, do, lse, delta


@triton.jit(do_not_specialize=["B", "T", "window"])
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, cu_q_ptr, cu_k_ptr, B, T,
    scale_log2, scale, bend, window, stride_qt, stride_qh, stride_ks, stride_kh, stride_vs,
    stride_vh, HK: tl.constexpr, G: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    hk = tl.program_id(1)
    b, q_start, len_q, first_row = find_sequence(cu_q_ptr, block, B, G, BM)
    if first_row >= len_q * G:
        return
    k_start = tl.load(cu_k_ptr + b)
    len_k = tl.load(cu_k_ptr + b + 1) - k_start
    offset = len_k - len_q
    cols = tl.arange(0, DP)
    row = first_row + tl.arange(0, BM)
    query = row // G
    head = hk * G + row % G
    live = row < len_q * G
    token = (q_start + query).to(tl.int64)
    q, do, lse, delta = _load_rows(
        q_ptr, do_ptr, lse_ptr, delta_ptr, token, head, live, T, stride_qt, stride_qh, cols,
        HK * G, DIM,
    )  # fmt: skip
    begin = 0
    end = len_k
    if CAUSAL:
        last_row = tl.minimum(first_row + BM, len_q * G) - 1
        end = tl.maximum(tl.minimum(last_row // G + offset + 1, len_k), 0)
    if WINDOWED:
        low = first_row // G + offset if CAUSAL else len_k - 1
        begin = tl.maximum(low - window + 1, 0) // BN * BN
    dq = tl.zeros((BM, DP), tl.float32)
    for first in range(begin, end, BN):
        key = first + tl.arange(0, BN)
        mask = (key[:, None] < len_k) & (cols[None, :] < DIM)
        slot = (k_start + key).to(tl.int64)[:, None]
        k_at = slot * stride_ks + hk.to(tl.int64) * stride_kh + cols[None, :]
        k = tl.load(k_ptr + k_at, mask=mask, other=0.0)
        v_at = slot * stride_vs + hk.to(tl.int64) * stride_vh + cols[None, :]
        v = tl.load(v_ptr + v_at, mask=mask, other=0.0)
        _, ds = _weights(
            q, k, do, v, lse, delta, query, key, live, len_k, offset, window, scale_log2,
            bend, CAUSAL, WINDOWED, CAPPED,
        )  # fmt: skip
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    at = dq_ptr + (token * (HK * G) + head)[:, None] * DIM + cols[None, :]
    mask = live[:, None] & (cols[None, :] < DIM)
    tl.store(at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["B", "T", "window"])
def _dkv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, cu_q_ptr, cu_k_ptr, B, T,
    scale_log2, scale, bend, window, stride_qt, stride_qh, stride_ks, stride_kh, stride_vs,
    stride_vh, HK: tl.constexpr, G: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    hk = tl.program_id(1)
    b, k_start, len_k, first_key = find_sequence(cu_k_ptr, block, B, 1, BN)
    if first_key >= len_k:
        return
    q_start = tl.load(cu_q_ptr + b)
    len_q = tl.load(cu_q_ptr + b + 1) - q_start
    offset = len_k - len_q
    cols = tl.arange(0, DP)
    key = first_key + tl.arange(0, BN)
    mask = (key[:, None] < len_k) & (cols[None, :] < DIM)
    slot = (k_start + key).to(tl.int64)[:, None]
    k_at = slot * stride_ks + hk.to(tl.int64) * stride_kh + cols[None, :]
    k = tl.load(k_ptr + k_at, mask=mask, other=0.0)
    v_at = slot * stride_vs + hk.to(tl.int64) * stride_vh + cols[None, :]
    v = tl.load(v_ptr + v_at, mask=mask, other=0.0)
    begin, end, _, _ = attending_rows(first_key, len_q, len_k, window, BN, BM, CAUSAL, WINDOWED)
    dk = tl.zeros((BN, DP), tl.float32)
    dv = tl.zeros((BN, DP), tl.float32)
    for step in range(begin * G, end * G):
        query = step // G * BM + tl.arange(0, BM)
        head = hk * G + step % G + tl.zeros_like(query)
        live = query < len_q
        q, do, lse, delta = _load_rows(
            q_ptr, do_ptr, lse_ptr, delta_ptr, (q_start + query).to(tl.int64), head, live, T,
            stride_qt, stride_qh, cols, HK * G, DIM,
        )  # fmt: skip
        p, ds = _weights(
            q, k, do, v, lse, delta, query, key, live, len_k, offset, window, scale_log2,
            bend, CAUSAL, WINDOWED, CAPPED,
        )  # fmt: skip
        dv = tl.dot(p.to(do.dtype).T, do, dv, input_precision="ieee")
        dk = tl.dot(ds.to(q.dtype).T, q, dk, input_precision="ieee")
    at = (slot * HK + hk) * DIM + cols[None, :]
    tl.store(dk_ptr + at, (dk * scale).to(dk_ptr.dtype.element_ty), mask=mask)
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=mask)


def _special(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> bool:
    """Whether the kernels for Hopper can run."""
    if block_n(q.shape[2], q.dtype) != 128 or not facts(q.device).gluon:
        return False
    from rlk_kernels.ops.attention.hopper.rings import can_read

    return can_read(q, k, v, do)


def backward(
    call: AttentionCall, lse: Tensor, do: Tensor, special: bool | None = None
) -> tuple[Tensor, Tensor, Tensor, str]:
    """(dq, dk, dv, the implementation that ran) of a call without a table, with its `out`;
    gradients are contiguous, in the inputs' dtypes.

    `special`, whether the kernels for Hopper run, changes the time and never the bits; None: the
    shape decides.
    """
    q, k, v, batch, group = call.q, call.k, call.v, call.batch, call.group
    causal, window, softcap = call.causal, call.window, call.softcap
    (tokens, heads, dim), (slots, kv_heads, _) = q.shape, k.shape
    if tokens == 0 or slots == 0 or batch == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), "triton"
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    cache = shape_cache(
        "attention_backward", q.shape, q.stride(), k.shape, k.stride(), v.stride(), q.dtype, batch,
        causal, window, special, q.device,
        (q.data_ptr() | k.data_ptr() | v.data_ptr() | do.data_ptr()) & 15 == 0, softcap > 0,
    )  # fmt: skip
    if softcap:
        special = False
    if special is None:
        special = cache.plan
    if special is None:
        special = cache.plan = _special(q, k, v, do)
    padded = max(16, power_of_2(dim))
    rows = 4096 // padded
    launch(
        cache, _prepare_kernel, (cdiv(max(tokens, slots), rows), heads, 1),
        (call.out, do, delta, dq, dk, dv, call.cu_q, call.lens_k, batch, tokens, slots, heads,
         kv_heads, dim, padded, rows),
        {"num_warps": 4},
    )  # fmt: skip
    if special:
        from rlk_kernels.ops.attention.hopper.dkv import keys_gradients
        from rlk_kernels.ops.attention.hopper.dq import queries_gradient

        queries_gradient(cache, call, do, lse, delta, dq)
        keys_gradients(cache, call, do, lse, delta, dk, dv)
        return dq, dk, dv, "triton/hopper"
    block = 32 if interpreting() or q.dtype == torch.float32 or padded > 128 else 64
    bend, scale_log2 = capped_scales(call.scale, softcap)
    shared = (
        call.cu_q, call.lens_k, batch, tokens, scale_log2, call.scale, bend, window or 0,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), kv_heads,
        group, dim, padded, block, block, causal, window is not None, softcap > 0,
    )  # fmt: skip
    options = {"num_warps": 4, "num_stages": 1 if q.dtype == torch.float32 else 2}
    launch(
        cache, _dq_kernel, (tokens * group // block + batch, kv_heads, 1),
        (q, k, v, do, lse, delta, dq, *shared),
        options,
    )  # fmt: skip
    launch(
        cache, _dkv_kernel, (slots // block + batch, kv_heads, 1),
        (q, k, v, do, lse, delta, dk, dv, *shared),
        options,
    )  # fmt: skip
    return dq, dk, dv, "triton"
