"""attention and paged_attention: softmax(scale q k^T) v over packed sequences, causal or not.

    s[j] = scale * (q . k[j]) for the keys that a row sees;  lse = log sum_j exp(s[j])
    out  = sum_j exp(s[j] - lse) v[j]

Reduction order: `order.py` and `portable.py`. Keys are processed in chunks aligned to key 0 of
their sequence, and chunks are merged from front to back. So a row has the same bits in prefill and
in paged decode, for any block of queries, block table, chunks of a prefill, cached prefix and other
sequences. Causal masks are aligned bottom-right: the last query sees the last key. `window` = w: a
query sees itself and the w - 1 keys before it. `softcap` = c: s[j] becomes c tanh(s[j] / c).
`sinks`: one logit for each head, without a value (`sinks.py`). Keys and values must be finite.
Sequences without keys, and rows that see no key, give out = 0 and lse = -inf.

T = queries of all sequences   S = keys of all sequences   Hq, Hk = heads   D = head size
B = sequences   P = block size of the cache
"""

import math

import torch
from torch import Tensor

from rlk_kernels.backend import choose
from rlk_kernels.custom_op import call, on_device_of
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.ops.arguments import last_dense
from rlk_kernels.ops.attention import sinks as sink_logits
from rlk_kernels.ops.attention.call import AttentionCall
from rlk_kernels.ops.attention.registered import (
    NO_GRADIENT,
    _attention,
    _paged_attention,
    _paged_attention_into,
    attend_into_alone,
    attend_paged_alone,
    on_triton,
)
from rlk_kernels.ops.attention.shared_schedule import Schedule, check_schedule, shape_key

MAX_DIM = 256


def default_scale(dim: int) -> float:
    """1 / sqrt(head size)."""
    return 1.0 / math.sqrt(dim)


def attention_ref(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *, causal: bool = True,
    scale: float | None = None, window: int | None = None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) by the formula in float64, for tests."""
    scale = default_scale(q.shape[2]) if scale is None else scale
    outs, lses = [], []
    for b in range(cu_q.numel() - 1):
        qb = q[cu_q[b] : cu_q[b + 1]].double()
        kb, vb = (x[cu_k[b] : cu_k[b + 1]].double() for x in (k, v))
        group = q.shape[1] // k.shape[1]
        kb, vb = kb.repeat_interleave(group, 1), vb.repeat_interleave(group, 1)
        s = torch.einsum("qhd,khd->hqk", qb, kb) * scale
        key = torch.arange(kb.shape[0], device=q.device)[None, :]
        last = torch.arange(qb.shape[0], device=q.device)[:, None] + kb.shape[0] - qb.shape[0]
        last = last if causal else torch.full_like(last, kb.shape[0] - 1)
        visible = key <= last
        if window is not None:
            visible = visible & (key > last - window)
        s = s if softcap is None else softcap * torch.tanh(s / softcap)
        s = s.masked_fill(~visible, float("-inf"))
        lse = torch.logsumexp(s, -1)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.double()[:, None])
        p = (s - torch.where(lse.isinf(), 0.0, lse)[..., None]).exp()
        outs.append(torch.einsum("hqk,khd->qhd", p, vb))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, 1)


def _check(op: str, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> None:
    (_, heads, dim), shape_k, dtype = q.shape, k.shape, q.dtype
    kv_heads, dim_k = shape_k[-2:]
    if v.shape != shape_k or dim != dim_k:
        raise UnsupportedShape(
            f"{op}: q {tuple(q.shape)}, k {tuple(shape_k)}, v {tuple(v.shape)} do not fit together"
        )
    if kv_heads == 0 or heads % kv_heads:
        raise UnsupportedShape(
            f"{op}: {heads} query heads are not a multiple of {kv_heads} KV heads"
        )
    if not 0 < dim <= MAX_DIM:
        raise UnsupportedShape(f"{op}: head size {dim} is not in 1..{MAX_DIM}")
    if not dtype == k.dtype == v.dtype or not dtype.is_floating_point:
        raise UnsupportedDtype(
            f"{op}: q, k, v are {dtype}, {k.dtype}, {v.dtype}; one floating dtype is needed"
        )
    if not scale > 0:
        raise ValueError(f"{op}: scale must be above 0, not {scale}")
    if window is not None and window < 1:
        raise ValueError(f"{op}: window must be at least 1, not {window}")


def _variant(
    op: str, heads: int, sinks: Tensor | None, softcap: float | None, *dtypes: torch.dtype
) -> tuple[Tensor | None, float]:
    """(sinks, softcap) for the custom operators, where 0 is no cap; raises if they are invalid.
    dtypes: those that sinks may have, besides float32."""
    if sinks is not None:
        sink_logits.check(op, sinks, heads, *dtypes)
        sinks = sinks.contiguous()
    if softcap is None:
        return sinks, 0.0
    if not softcap > 0:
        raise ValueError(f"{op}: softcap must be above 0, not {softcap}; use None for no cap")
    return sinks, float(softcap)


def _index(op: str, name: str, x: Tensor, size: int | None = None) -> Tensor:
    dtype = x.dtype
    fits = x.dim() == 1 and x.numel() > 0 if size is None else x.shape == (size,)
    if dtype not in (torch.int32, torch.int64) or not fits:
        raise UnsupportedShape(
            f"{op}: {name} must have {'B + 1' if size is None else size} integers, not "
            f"{dtype} {tuple(x.shape)}"
        )
    if dtype == torch.int32 and x.is_contiguous():
        return x
    return x.to(torch.int32).contiguous()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """out[T, Hq, D], or (out, lse[Hq, T] in fp32) of q[T, Hq, D], k and v[S, Hk, D].

    q, k, v: bfloat16, float16, float32 (float64 on the torch backend); Hq is a multiple of Hk, and
    D <= 256 (tuned for 64 and 128). Inputs whose head dimension is not dense are copied.
    cu_seqlens_q, cu_seqlens_k: [B + 1] integers, the begins of the sequences. scale defaults to
    1 / sqrt(D). The result is differentiable in q, k, v and sinks[Hq] (float32, which lse
    includes); lse has no gradient. cu_seqlens beyond q or k raise on the torch backend and are not
    checked on a GPU. Rows of q outside every sequence are undefined on a GPU and 0 on the torch
    backend, and have gradients of 0. Raises UnsupportedShape, UnsupportedDtype, UnsupportedDevice,
    ValueError, and what `backend.choose` raises.
    """
    if q.dim() != 3 or k.dim() != 3:
        raise UnsupportedShape(
            f"attention: q[T, Hq, D] and k[S, Hk, D] are needed, not {tuple(q.shape)} and "
            f"{tuple(k.shape)}"
        )
    scale = default_scale(q.shape[-1]) if scale is None else float(scale)
    _check("attention", q, k, v, scale, window)
    cu_q = _index("attention", "cu_seqlens_q", cu_seqlens_q)
    cu_k = _index("attention", "cu_seqlens_k", cu_seqlens_k, cu_q.numel())
    chosen = choose("attention", backend, q, k, v, cu_q, cu_k, sinks)
    q, k, v = last_dense(q), last_dense(k), last_dense(v)
    cap = 0.0
    if sinks is not None or softcap is not None:
        sinks, cap = _variant("attention", q.shape[1], sinks, softcap)
    out, lse = call(_attention, q, k, v, sinks, cu_q, cu_k, causal, scale, window, cap, chosen)
    return (out, lse) if return_lse else out


def _paged(
    op: str, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, context_lens: Tensor,
    cu_seqlens_q: Tensor, scale: float | None, window: int | None,
) -> tuple[float, Tensor, Tensor, Tensor]:  # fmt: skip
    """(scale, table, lengths, cu_seqlens_q) for the kernels; raises if the arguments do not fit
    together."""
    if q.dim() != 3 or k_cache.dim() != 4 or block_table.dim() != 2:
        raise UnsupportedShape(
            f"{op}: q[T, Hq, D], k_cache[blocks, P, Hk, D] and block_table[B, n] are needed, not "
            f"{tuple(q.shape)}, {tuple(k_cache.shape)} and {tuple(block_table.shape)}"
        )
    scale = default_scale(q.shape[-1]) if scale is None else float(scale)
    _check(op, q, k_cache, v_cache, scale, window)
    cu_q = _index(op, "cu_seqlens_q", cu_seqlens_q, block_table.shape[0] + 1)
    lens = _index(op, "context_lens", context_lens, block_table.shape[0])
    if block_table.dtype not in (torch.int32, torch.int64) or k_cache.shape[1] == 0:
        raise UnsupportedShape(
            f"{op}: block_table must have int32 or int64 numbers, not {block_table.dtype}, and a "
            f"block at least one key, not {k_cache.shape[1]}"
        )
    table = block_table if block_table.dtype == torch.int32 else block_table.to(torch.int32)
    return scale, last_dense(table), lens, cu_q


@torch.compiler.disable
def paged_schedule(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    cu_seqlens_q: Tensor,
    window: int | None = None,
    softcap: float | None = None,
    backend: str | None = None,
) -> Schedule | None:
    """The list of work that each call of `paged_attention` would otherwise make on the device, made
    once for all layers of a pass; pass it to them as `schedule=`.

    Returns None if no list is needed: on the torch backend, for one sequence, and for tables too
    short for two chunks of keys. Of q and the caches only shapes, dtypes and strides are read. The
    list is made on the current stream, and again in each replay of a CUDA graph that captures this
    call. It is valid as long as the values of block_table, context_lens and cu_seqlens_q do not
    change. This is not checked: with other values a call reads and writes memory out of range.
    torch.compile does not trace this function. Raises what `paged_attention` raises for the same
    arguments.
    """
    _, table, lens, cu_q = _paged(
        "paged_schedule", q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q, None, window
    )
    _, cap = _variant("paged_schedule", q.shape[1], None, softcap)
    if choose("paged_schedule", backend, q, k_cache, v_cache, table, lens, cu_q) == "torch":
        return None
    k_cache, v_cache = last_dense(k_cache), last_dense(v_cache)
    with on_device_of(q):
        shared = on_triton().paged_pieces(
            AttentionCall(q, k_cache, v_cache, cu_q, lens, table, True, 1.0, window, cap)
        )
    if shared is None:
        return None
    made_for = shape_key(q, k_cache, table, window, softcap is not None)
    return Schedule(
        plan=shared.entries, pieces=shared.pieces, special=shared.special, made_for=made_for
    )


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    cu_seqlens_q: Tensor,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    schedule: Schedule | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of q[T, Hq, D] over a paged cache; the bits of `attention`.

    k_cache, v_cache[blocks, P, Hk, D]; block_table[B, most blocks of a sequence]; context_lens[B]:
    the numbers of keys, including those of the queries, which are in the cache already. Slots after
    a sequence's last key never affect a result. With out[T, Hq, D] (contiguous, in q's dtype) the
    result is written to `out`, which is returned. `schedule`: the result of `paged_schedule` for
    the same tables and lengths; it changes the time and no bit, and the torch backend ignores it.
    sinks[Hq] are float32 or q's dtype. There is no gradient. A table with too few blocks, or with a
    block that the cache lacks, raises on the torch backend and is not checked on a GPU. Rows of q
    outside every sequence (the padding of a CUDA graph) are undefined on a GPU and 0 on the torch
    backend. Raises UnsupportedShape (also for a schedule of other shapes, window or softcap),
    UnsupportedDtype, ValueError (also if `out` would need a gradient), and what `backend.choose`
    raises.
    """
    scale, table, lens, cu_q = _paged(
        "paged_attention", q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q, scale,
        window,
    )  # fmt: skip
    plan = pieces = None
    special = False
    if schedule is not None:
        check_schedule(schedule, shape_key(q, k_cache, table, window, softcap is not None))
        plan, pieces, special = schedule.plan, schedule.pieces, schedule.special
    chosen = choose(
        "paged_attention", backend, q, k_cache, v_cache, table, lens, cu_q, out, plan, sinks
    )
    q, k_cache, v_cache = last_dense(q), last_dense(k_cache), last_dense(v_cache)
    if out is not None and (
        out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous()
    ):
        raise UnsupportedShape(
            f"paged_attention: out must be contiguous with the shape and dtype of q, "
            f"{tuple(q.shape)} {q.dtype}, not {tuple(out.shape)} {out.dtype} with strides "
            f"{out.stride()}"
        )
    if out is not None and torch.is_grad_enabled() and (q.requires_grad or k_cache.requires_grad):
        raise ValueError(f"paged_attention: {NO_GRADIENT}; use torch.no_grad()")
    cap = 0.0
    if sinks is not None or softcap is not None:
        sinks, cap = _variant("paged_attention", q.shape[1], sinks, softcap, q.dtype)
        sinks = None if sinks is None else sinks.detach()
    arguments = (
        q, k_cache, v_cache, sinks, table, lens, cu_q, scale, window, cap, plan, pieces, special,
        chosen,
    )  # fmt: skip
    needs_lse = return_lse or sinks is not None or cap > 0
    if out is None:
        alone = None if needs_lse else attend_paged_alone
        result, lse = call(_paged_attention, *arguments, inference=alone)
    else:
        alone = None if needs_lse else attend_into_alone
        result, lse = out, call(_paged_attention_into, out, *arguments, inference=alone)
    return (result, lse) if return_lse else result
