"""Attention with sinks, a softcap, or both: custom operators beside those of `registered`."""

import torch
from torch import Tensor

from rlk_kernels.backend import record
from rlk_kernels.ops.attention import portable
from rlk_kernels.ops.attention import sinks as sink_logits
from rlk_kernels.ops.attention.registered import (
    _attention,
    _attention_backward,
    _paged_attention,
    empty_like_results,
    lengths_of,
)


def check_variant(op: str, heads: int, sinks: Tensor | None, softcap: float | None) -> None:
    """Raise where sinks or a softcap cannot be had."""
    if sinks is not None:
        sink_logits.check(op, sinks, heads)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{op}: softcap must be above 0, not {softcap}; None is no cap")


@torch.library.custom_op("rlk::attention_with", mutates_args=())
def _attention_with(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_q: Tensor, cu_k: Tensor, causal: bool,
    scale: float, window: int | None, softcap: float, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`_attention` with sinks, a softcap, or both."""
    if softcap and backend != "torch":
        from rlk_kernels.ops.attention import forward

        out, lse, ran = forward.forward(
            q, k, v, cu_q, cu_k, None, causal, scale, window, softcap=softcap
        )
        record("attention", ran)
        found = out, lse
    elif softcap:
        record("attention", "torch")
        start, length = lengths_of(cu_k)
        found = portable.forward(
            q, k, v, cu_q, start, length, None, 1, causal, scale, window, softcap
        )
    else:
        found = _attention._init_fn(q, k, v, cu_q, cu_k, causal, scale, window, backend)
    return found if sinks is None else sink_logits.add(*found, sinks, backend)


@_attention_with.register_fake
def _(q, k, v, sinks, cu_q, cu_k, causal, scale, window, softcap, backend):
    return empty_like_results(q)


@torch.library.custom_op("rlk::attention_with_backward", mutates_args=())
def _attention_with_backward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_q: Tensor, cu_k: Tensor, causal: bool,
    scale: float, window: int | None, softcap: float, out: Tensor, lse: Tensor, do: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv, dsinks), the last one empty without sinks."""
    if softcap and backend != "torch":
        from rlk_kernels.ops.attention import backward

        *grads, ran = backward.backward(
            q, k, v, cu_q, cu_k, causal, scale, window, out, lse, do, softcap=softcap
        )
        record("attention_backward", ran)
    elif softcap:
        record("attention_backward", "torch")
        start, length = lengths_of(cu_k)
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
    if softcap and backend != "torch":
        from rlk_kernels.ops.attention import forward

        out, lse, ran = forward.forward(
            q, k_cache, v_cache, cu_q, context_lens, block_table, True, scale, window,
            softcap=softcap,
        )  # fmt: skip
        record("paged_attention", ran)
        found = out, lse
    elif softcap:
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
    return empty_like_results(q)
