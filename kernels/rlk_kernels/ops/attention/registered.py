"""The custom operators of attention and paged_attention, and their gradient."""

import functools
from itertools import pairwise

from torch import Tensor

from rlk_kernels.backend import record
from rlk_kernels.custom_op import SECOND, custom_op
from rlk_kernels.device import lazy_module
from rlk_kernels.numerics.dtypes import wide_dtype
from rlk_kernels.ops.attention import portable
from rlk_kernels.ops.attention import sinks as sink_logits
from rlk_kernels.ops.attention.call import AttentionCall, PieceList


def lengths_of(cu: Tensor) -> tuple[list[int], list[int]]:
    bounds = cu.tolist()
    return bounds[:-1], [b - a for a, b in pairwise(bounds)]


on_triton = lazy_module("rlk_kernels.ops.attention.forward")


def _fake(q, *rest):
    lse = wide_dtype(q.dtype)
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=lse)


def _fake_backward(q, k, v, sinks, *rest):
    return [x.new_empty(x.shape) for x in (q, k, v, sinks) if x is not None]


@custom_op("attention_backward", _fake_backward, no_gradient=("attention", SECOND))
def _attention_backward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_q: Tensor, cu_k: Tensor, out: Tensor,
    lse: Tensor, do: Tensor, causal: bool, scale: float, window: int | None, softcap: float,
    backend: str,
) -> list[Tensor]:  # fmt: skip
    """[dq, dk, dv], and dsinks with sinks."""
    if backend == "torch":
        start, length = lengths_of(cu_k)
        grads = portable.backward(
            q, k, v, cu_q, start, length, causal, scale, window, out, lse, do, softcap
        )
        ran = "torch"
    else:
        from rlk_kernels.ops.attention import backward

        call = AttentionCall(q, k, v, cu_q, cu_k, None, causal, scale, window, softcap, out)
        *grads, ran = backward.backward(call, lse, do)
    record("attention_backward", ran)
    if sinks is not None:
        grads = [*grads, sink_logits.gradient(out, lse, sinks, do, backend)]
    return list(grads)


@custom_op("attention", _fake, gradients=(6, _attention_backward, True))
def _attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_q: Tensor, cu_k: Tensor, causal: bool,
    scale: float, window: int | None, softcap: float, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse); softcap: 0 for no cap."""
    if backend == "torch":
        start, length = lengths_of(cu_k)
        out, lse = portable.forward(
            q, k, v, cu_q, start, length, None, 1, causal, scale, window, softcap
        )
        ran = "torch"
    else:
        out, lse, ran = on_triton().forward(
            AttentionCall(q, k, v, cu_q, cu_k, None, causal, scale, window, softcap)
        )
    record("attention", ran)
    return (out, lse) if sinks is None else sink_logits.add(out, lse, sinks, backend)


def attend_paged(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, sinks: Tensor | None, block_table: Tensor,
    context_lens: Tensor, cu_q: Tensor, scale: float, window: int | None, softcap: float,
    plan: Tensor | None, pieces: Tensor | None, special: bool, backend: str,
    out: Tensor | None = None, keeps_lse: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse). plan, pieces, special: those of a `Schedule`, or None; softcap: 0 for no cap;
    out: memory for the result, on the triton backend alone; keeps_lse: see `AttentionCall`."""
    if backend == "torch":
        k, v = (x.reshape(-1, *x.shape[2:]) for x in (k_cache, v_cache))
        length = context_lens.tolist()
        start = [0] * len(length)
        page, ran = k_cache.shape[1], "torch"
        out, lse = portable.forward(
            q, k, v, cu_q, start, length, block_table, page, True, scale, window, softcap
        )
    else:
        shared = None if plan is None or pieces is None else PieceList(plan, pieces, special)
        out, lse, ran = on_triton().forward(
            AttentionCall(
                q, k_cache, v_cache, cu_q, context_lens, block_table, True, scale, window, softcap,
                out, shared, keeps_lse,
            )
        )  # fmt: skip
    record("paged_attention", ran)
    return (out, lse) if sinks is None else sink_logits.add(out, lse, sinks, backend)


attend_paged_alone = functools.partial(attend_paged, keeps_lse=False)
"""For callers that do not read lse."""


NO_GRADIENT = "it has no gradient; attention has one"


@custom_op("paged_attention", _fake, no_gradient=("paged_attention", NO_GRADIENT))
def _paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, sinks: Tensor | None, block_table: Tensor,
    context_lens: Tensor, cu_q: Tensor, scale: float, window: int | None, softcap: float,
    plan: Tensor | None, pieces: Tensor | None, special: bool, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return attend_paged(
        q, k_cache, v_cache, sinks, block_table, context_lens, cu_q, scale, window, softcap, plan,
        pieces, special, backend,
    )  # fmt: skip


def _attend_into(
    out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, sinks: Tensor | None,
    block_table: Tensor, context_lens: Tensor, cu_q: Tensor, scale: float, window: int | None,
    softcap: float, plan: Tensor | None, pieces: Tensor | None, special: bool, backend: str,
    keeps_lse: bool = True,
) -> Tensor:  # fmt: skip
    """`attend_paged` into `out`; returns lse."""
    result, lse = attend_paged(
        q, k_cache, v_cache, sinks, block_table, context_lens, cu_q, scale, window, softcap, plan,
        pieces, special, backend, out, keeps_lse,
    )  # fmt: skip
    if result is not out:
        out.copy_(result)
    return lse


attend_into_alone = functools.partial(_attend_into, keeps_lse=False)
"""For callers that do not read lse."""


@custom_op("paged_attention_into", lambda out, *rest: _fake(*rest)[1], writes=("out",))
def _paged_attention_into(
    out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, sinks: Tensor | None,
    block_table: Tensor, context_lens: Tensor, cu_q: Tensor, scale: float, window: int | None,
    softcap: float, plan: Tensor | None, pieces: Tensor | None, special: bool, backend: str,
) -> Tensor:  # fmt: skip
    """lse; the result is written to `out`, on triton by the kernel itself."""
    return _attend_into(
        out, q, k_cache, v_cache, sinks, block_table, context_lens, cu_q, scale, window, softcap,
        plan, pieces, special, backend,
    )  # fmt: skip
