"""attention and paged_attention: softmax(scale q k^T) v over packed sequences, causal or not.

    s[j] = scale * (q . k[j]) for the keys that a row sees;  lse = log sum_j exp(s[j])
    out  = sum_j exp(s[j] - lse) v[j]

Reduction order: `order.py` and `portable.py`. Keys in chunks aligned to key 0
of their sequence, chunks merged front to back; so a row has the same bits in prefill and in paged
decode, whatever the block of queries, the block table, the chunked prefill, the cached prefix and
the neighbours. Causal is aligned bottom-right: the last query sees the last key. `window` = w: a
query sees itself and the w - 1 keys before it. `softcap` = c: s[j] becomes c tanh(s[j] / c), on
the torch backend alone. `sinks`: a logit a head without a value (`sinks.py`). Keys and values must
be finite. Sequences without keys, and rows that see none, give out = 0 and lse = -inf.

T = queries of all sequences   S = keys of all sequences   Hq, Hk = heads   D = head size
B = sequences   P = block size of the cache
"""

import math
from itertools import pairwise

import torch
from torch import Tensor

from rlk_kernels.backend import call, choose, record
from rlk_kernels.errors import UnsupportedDevice, UnsupportedDtype, UnsupportedShape
from rlk_kernels.ops.attention import portable
from rlk_kernels.ops.attention import sinks as sink_logits

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
        seen = key <= last
        if window is not None:
            seen = seen & (key > last - window)
        s = s if softcap is None else softcap * torch.tanh(s / softcap)
        s = s.masked_fill(~seen, float("-inf"))
        lse = torch.logsumexp(s, -1)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.double()[:, None])
        p = (s - torch.where(lse.isinf(), 0.0, lse)[..., None]).exp()
        outs.append(torch.einsum("hqk,khd->qhd", p, vb))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, 1)


def _lengths(cu: Tensor) -> tuple[list[int], list[int]]:
    bounds = cu.tolist()
    return bounds[:-1], [b - a for a, b in pairwise(bounds)]


def _empty(q: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=lse)


@torch.library.custom_op("rlk::attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, causal: bool, scale: float,
    window: int | None, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if backend == "torch":
        record("attention", "torch")
        start, length = _lengths(cu_k)
        return portable.forward(q, k, v, cu_q, start, length, None, 1, causal, scale, window)
    from rlk_kernels.ops.attention import forward

    out, lse, ran = forward.forward(q, k, v, cu_q, cu_k, None, causal, scale, window)
    record("attention", ran)
    return out, lse


@_attention.register_fake
def _(q, k, v, cu_q, cu_k, causal, scale, window, backend):
    return _empty(q)


@torch.library.custom_op("rlk::attention_backward", mutates_args=())
def _attention_backward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, causal: bool, scale: float,
    window: int | None, out: Tensor, lse: Tensor, do: Tensor, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if backend == "torch":
        record("attention_backward", "torch")
        start, length = _lengths(cu_k)
        return portable.backward(q, k, v, cu_q, start, length, causal, scale, window, out, lse, do)
    from rlk_kernels.ops.attention import backward

    *grads, ran = backward.backward(q, k, v, cu_q, cu_k, causal, scale, window, out, lse, do)
    record("attention_backward", ran)
    return tuple(grads)


@_attention_backward.register_fake
def _(q, k, v, cu_q, cu_k, causal, scale, window, out, lse, do, backend):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx, inputs, output):
    q, k, v, cu_q, cu_k, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, cu_q, cu_k, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, do, _dlse):
    if do is None:
        return (None,) * 9
    q, k, v, cu_q, cu_k, out, lse = ctx.saved_tensors
    causal, scale, window, backend = ctx.rest
    grads = _attention_backward(
        q, k, v, cu_q, cu_k, causal, scale, window, out, lse, do.contiguous(), backend
    )
    return (*grads, None, None, None, None, None, None)


_attention.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("rlk::attention_with", mutates_args=())
def _attention_with(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_q: Tensor, cu_k: Tensor, causal: bool,
    scale: float, window: int | None, softcap: float, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`_attention` with sinks, a softcap (torch alone), or both."""
    if softcap:
        record("attention", "torch")
        start, length = _lengths(cu_k)
        found = portable.forward(
            q, k, v, cu_q, start, length, None, 1, causal, scale, window, softcap
        )
    else:
        found = _attention._init_fn(q, k, v, cu_q, cu_k, causal, scale, window, backend)
    return found if sinks is None else sink_logits.add(*found, sinks, backend)


@_attention_with.register_fake
def _(q, k, v, sinks, cu_q, cu_k, causal, scale, window, softcap, backend):
    return _empty(q)


@torch.library.custom_op("rlk::attention_with_backward", mutates_args=())
def _attention_with_backward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_q: Tensor, cu_k: Tensor, causal: bool,
    scale: float, window: int | None, softcap: float, out: Tensor, lse: Tensor, do: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv, dsinks), the last one empty without sinks."""
    if softcap:
        record("attention_backward", "torch")
        start, length = _lengths(cu_k)
        grads = portable.backward(
            q, k, v, cu_q, start, length, causal, scale, window, out, lse, do, softcap
        )
    else:
        grads = _attention_backward._init_fn(
            q, k, v, cu_q, cu_k, causal, scale, window, out, lse, do, backend
        )
    if sinks is None:
        return *grads, lse.new_empty(0)
    return *grads, sink_logits.gradient(out, lse, sinks, do, backend)


@_attention_with_backward.register_fake
def _(q, k, v, sinks, cu_q, cu_k, causal, scale, window, softcap, out, lse, do, backend):
    heads = 0 if sinks is None else q.shape[1]
    grads = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    return *grads, lse.new_empty(heads, dtype=torch.float32)


def _setup_with(ctx, inputs, output):
    q, k, v, sinks, cu_q, cu_k, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, sinks, cu_q, cu_k, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward_with(ctx, do, _dlse):
    if do is None:
        return (None,) * 11
    q, k, v, sinks, cu_q, cu_k, out, lse = ctx.saved_tensors
    *options, backend = ctx.rest
    *grads, dsinks = _attention_with_backward(
        q, k, v, sinks, cu_q, cu_k, *options, out, lse, do.contiguous(), backend
    )
    return (*grads, None if sinks is None else dsinks, *(None,) * 7)


_attention_with.register_autograd(_backward_with, setup_context=_setup_with)


@torch.library.custom_op("rlk::paged_attention_with", mutates_args=())
def _paged_attention_with(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, sinks: Tensor | None, block_table: Tensor,
    context_lens: Tensor, cu_q: Tensor, scale: float, window: int | None, softcap: float,
    backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if softcap:
        record("paged_attention", "torch")
        k, v = (x.reshape(-1, *x.shape[2:]) for x in (k_cache, v_cache))
        length = context_lens.tolist()
        found = portable.forward(
            q, k, v, cu_q, [0] * len(length), length, block_table, k_cache.shape[1], True, scale,
            window, softcap,
        )  # fmt: skip
    else:
        found = _paged_attention._init_fn(
            q, k_cache, v_cache, block_table, context_lens, cu_q, scale, window, backend
        )
    return found if sinks is None else sink_logits.add(*found, sinks, backend)


@_paged_attention_with.register_fake
def _(q, k_cache, v_cache, sinks, block_table, context_lens, cu_q, scale, window, softcap, backend):
    return _empty(q)


@torch.library.custom_op("rlk::paged_attention", mutates_args=())
def _paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, context_lens: Tensor,
    cu_q: Tensor, scale: float, window: int | None, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if backend == "torch":
        record("paged_attention", "torch")
        k, v = (x.reshape(-1, *x.shape[2:]) for x in (k_cache, v_cache))
        length = context_lens.tolist()
        start = [0] * len(length)
        page = k_cache.shape[1]
        return portable.forward(
            q, k, v, cu_q, start, length, block_table, page, True, scale, window
        )
    from rlk_kernels.ops.attention import forward

    out, lse, ran = forward.forward(
        q, k_cache, v_cache, cu_q, context_lens, block_table, True, scale, window
    )
    record("paged_attention", ran)
    return out, lse


@torch.library.custom_op("rlk::paged_attention_into", mutates_args=("out",))
def _paged_attention_into(
    out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor,
    context_lens: Tensor, cu_q: Tensor, scale: float, window: int | None, backend: str,
) -> Tensor:  # fmt: skip
    """lse; the result goes to `out`, where it is written at once on triton."""
    if backend == "torch":
        found, lse = _paged_attention._init_fn(
            q, k_cache, v_cache, block_table, context_lens, cu_q, scale, window, backend
        )
        out.copy_(found)
        return lse
    from rlk_kernels.ops.attention import forward

    _, lse, ran = forward.forward(
        q, k_cache, v_cache, cu_q, context_lens, block_table, True, scale, window, out=out
    )
    record("paged_attention", ran)
    return lse


@_paged_attention_into.register_fake
def _(out, q, k_cache, v_cache, block_table, context_lens, cu_q, scale, window, backend):
    return _empty(q)[1]


@_paged_attention.register_fake
def _(q, k_cache, v_cache, block_table, context_lens, cu_q, scale, window, backend):
    return _empty(q)


def _check(op: str, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> None:
    if q.dim() != 3 or k.shape != v.shape or q.shape[2] != k.shape[-1]:
        raise UnsupportedShape(
            f"{op}: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit together"
        )
    heads, kv_heads = q.shape[1], k.shape[-2]
    if kv_heads == 0 or heads % kv_heads:
        raise UnsupportedShape(f"{op}: {heads} query heads are no multiple of {kv_heads} KV heads")
    if not 0 < q.shape[2] <= MAX_DIM:
        raise UnsupportedShape(f"{op}: head size {q.shape[2]} is not in 1..{MAX_DIM}")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise UnsupportedDtype(f"{op}: q, k, v are {q.dtype}, {k.dtype}, {v.dtype}")
    if not scale > 0:
        raise ValueError(f"{op}: scale must be above 0, not {scale}")
    if window is not None and window < 1:
        raise ValueError(f"{op}: window must be at least 1, not {window}")


def _check_with(
    op: str, heads: int, sinks: Tensor | None, softcap: float | None, backend: str
) -> None:
    """Raise where sinks or a softcap cannot be had."""
    if sinks is not None:
        sink_logits.check(op, sinks, heads)
    if softcap is not None:
        if not softcap > 0:
            raise ValueError(f"{op}: softcap must be above 0, not {softcap}; None is no cap")
        if backend != "torch":
            raise UnsupportedDevice(
                f"{op}: a softcap runs on the torch backend alone, and the backend here is "
                f"{backend}; use backend='torch'"
            )


def _last_dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _index(name: str, x: Tensor, size: int | None = None) -> Tensor:
    fits = x.dim() == 1 and x.numel() > 0 if size is None else x.shape == (size,)
    if x.dtype not in (torch.int32, torch.int64) or not fits:
        raise UnsupportedShape(
            f"attention: {name} must hold {'B + 1' if size is None else size} integers, not "
            f"{x.dtype} {tuple(x.shape)}"
        )
    if x.dtype == torch.int32 and x.is_contiguous():
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

    cu_seqlens_q, cu_seqlens_k: [B + 1] integers, where each sequence begins. bfloat16, float16,
    float32 (float64 on the torch backend); Hq a multiple of Hk; D <= 256 (tuned for 64 and 128);
    scale defaults to 1 / sqrt(D). The head dimension must be dense; otherwise it is copied.
    Differentiable in q, k, v and sinks[Hq] (float32; part of lse too); lse is not. A softcap needs
    the torch backend. Bounds outside of q or k raise on the torch backend and are not looked at on
    a GPU. Raises UnsupportedShape, UnsupportedDtype, UnsupportedDevice, ValueError, and what
    `backend.choose` raises.
    """
    if q.dim() != 3 or k.dim() != 3:
        raise UnsupportedShape(
            f"attention: q[T, Hq, D] and k[S, Hk, D] are needed, not {tuple(q.shape)} and "
            f"{tuple(k.shape)}"
        )
    scale = default_scale(q.shape[-1]) if scale is None else float(scale)
    _check("attention", q, k, v, scale, window)
    cu_q = _index("cu_seqlens_q", cu_seqlens_q)
    cu_k = _index("cu_seqlens_k", cu_seqlens_k, cu_q.numel())
    chosen = choose("attention", backend, q, k, v, cu_q, cu_k)
    q, k, v = (_last_dense(x) for x in (q, k, v))
    if sinks is None and softcap is None:
        out, lse = call(_attention, q, k, v, cu_q, cu_k, causal, scale, window, chosen)
    else:
        _check_with("attention", q.shape[1], sinks, softcap, chosen)
        out, lse = call(
            _attention_with, q, k, v, None if sinks is None else sinks.contiguous(), cu_q, cu_k,
            causal, scale, window, float(softcap or 0.0), chosen,
        )  # fmt: skip
    return (out, lse) if return_lse else out


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
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of q[T, Hq, D] over a paged cache; the bits of `attention`.

    k_cache, v_cache[blocks, P, Hk, D]; block_table[B, most blocks of a sequence]; context_lens[B]
    counts the keys of a sequence, those of its queries included (they are in the cache already).
    Slots behind a sequence's last key are never read into a result. With out[T, Hq, D] (contiguous,
    q's dtype) the result is written there, and `out` is returned. Not differentiable. A table
    with too few blocks, or with one that the cache has not, raises on the torch backend and is not
    looked at on a GPU. Raises UnsupportedShape, UnsupportedDtype, ValueError, and what
    `backend.choose` raises.
    """
    if q.dim() != 3 or k_cache.dim() != 4 or block_table.dim() != 2:
        raise UnsupportedShape(
            "paged_attention: q[T, Hq, D], k_cache[blocks, P, Hk, D] and block_table[B, n] are "
            f"needed, not {tuple(q.shape)}, {tuple(k_cache.shape)} and {tuple(block_table.shape)}"
        )
    scale = default_scale(q.shape[-1]) if scale is None else float(scale)
    _check("paged_attention", q, k_cache, v_cache, scale, window)
    cu_q = _index("cu_seqlens_q", cu_seqlens_q, block_table.shape[0] + 1)
    lens = _index("context_lens", context_lens, block_table.shape[0])
    if block_table.dtype not in (torch.int32, torch.int64) or k_cache.shape[1] == 0:
        raise UnsupportedShape(
            f"paged_attention: block_table must hold integers, not {block_table.dtype}, and a "
            f"block at least one key, not {k_cache.shape[1]}"
        )
    table = block_table if block_table.dtype == torch.int32 else block_table.to(torch.int32)
    table = table if table.stride(-1) == 1 else table.contiguous()
    chosen = choose("paged_attention", backend, q, k_cache, v_cache, table, lens, cu_q, out)
    q, k_cache, v_cache = _last_dense(q), _last_dense(k_cache), _last_dense(v_cache)
    sinks = None if sinks is None else sinks.detach().contiguous()
    if out is not None and (
        out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous()
    ):
        raise UnsupportedShape(
            f"paged_attention: out must be contiguous and like q {tuple(q.shape)} {q.dtype}, "
            f"not {tuple(out.shape)} {out.dtype} of strides {out.stride()}"
        )
    if sinks is not None or softcap is not None:
        _check_with("paged_attention", q.shape[1], sinks, softcap, chosen)
        found, lse = call(
            _paged_attention_with, q, k_cache, v_cache, sinks, table, lens, cu_q, scale, window,
            float(softcap or 0.0), chosen,
        )  # fmt: skip
        found = found if out is None else out.copy_(found)
        return (found, lse) if return_lse else found
    if out is not None:
        lse = call(
            _paged_attention_into,
            out,
            q,
            k_cache,
            v_cache,
            table,
            lens,
            cu_q,
            scale,
            window,
            chosen,
        )
        return (out, lse) if return_lse else out
    out, lse = call(_paged_attention, q, k_cache, v_cache, table, lens, cu_q, scale, window, chosen)
    return (out, lse) if return_lse else out
