"""Attention with sinks, a softcap, or both: custom operators beside those of `registered`."""

import torch
from torch import Tensor

from rlk_kernels.backend import refuse_gradient
from rlk_kernels.ops.attention import sinks as sink_logits
from rlk_kernels.ops.attention.registered import (
    NO_GRADIENT,
    attend,
    attend_paged,
    empty_like_results,
    gradients,
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
    result = attend(q, k, v, cu_q, cu_k, causal, scale, window, backend, softcap)
    return result if sinks is None else sink_logits.add(*result, sinks, backend)


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
    grads = gradients(q, k, v, cu_q, cu_k, causal, scale, window, out, lse, do, backend, softcap)
    if sinks is None:
        return *grads, lse.new_empty(0)
    return *grads, sink_logits.gradient(out, lse, sinks, do, backend)


@_attention_with_backward.register_fake
def _(q, k, v, sinks, cu_q, cu_k, causal, scale, window, softcap, out, lse, do, backend):
    heads = 0 if sinks is None else q.shape[1]
    grads = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    return *grads, lse.new_empty(heads, dtype=torch.float32)


refuse_gradient(_attention_with_backward, "attention")


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
    plan: Tensor | None, pieces: Tensor | None, special: bool, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    result = attend_paged(
        q, k_cache, v_cache, block_table, context_lens, cu_q, scale, window, plan, pieces, special,
        backend, softcap,
    )  # fmt: skip
    return result if sinks is None else sink_logits.add(*result, sinks, backend)


@_paged_attention_with.register_fake
def _(q, *_):
    return empty_like_results(q)


refuse_gradient(_paged_attention_with, "paged_attention", NO_GRADIENT)
