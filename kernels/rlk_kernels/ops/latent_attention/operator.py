"""latent_attention and paged_latent_attention: softmax(scale q k^T) c, causal, over packed
sequences.

    k[j] = (c[j], r[j]): a latent of L features and R rotated ones, a key of all heads
    s[j] = scale * (q . k[j]) for the keys that a row sees;  lse = log sum_j exp(s[j])
    out  = sum_j exp(s[j] - lse) c[j]

This is multi-head latent attention with absorbed weights (DeepSeek-V2, arXiv 2405.04434, section
2.1): q is a head's query times the weight that would expand a latent to the head's key, and out is
still to be multiplied by the weight that would expand it to a value. `grouped_linear` computes
these products by head.

Reduction order: that of `attention`, with chunks of keys of another size (`kernels.py`), and on the
torch backend the same. So a row has the same bits in prefill and in paged decode, for any block
table, chunks of a prefill, cached prefix and other sequences. Causal masks are aligned
bottom-right: the last query sees the last key. Latents must be finite. Rows that see no key give
out = 0.

T = queries of all sequences  S = keys of all sequences  H = heads  L = features of a latent
R = rotated features  B = sequences  P = block size of the cache
"""

from itertools import pairwise

import torch
from torch import Tensor

from rlk_kernels.backend import choose, record
from rlk_kernels.custom_op import SECOND, call, custom_op
from rlk_kernels.device import lazy_module
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.numerics.dtypes import wide_dtype
from rlk_kernels.ops.arguments import int32_vector, last_dense
from rlk_kernels.ops.attention import portable
from rlk_kernels.ops.attention.operator import attention_ref

MAX_LATENT, MAX_ROTATED = 512, 128

_on_triton = lazy_module("rlk_kernels.ops.latent_attention.on_triton")


def latent_attention_ref(
    q: Tensor, latents: Tensor, cu_q: Tensor, cu_k: Tensor, *, latent: int, scale: float
) -> tuple[Tensor, Tensor]:
    """(out, lse) by the formula in float64, for tests."""
    keys = latents[:, None]
    return attention_ref(q, keys, keys[..., :latent], cu_q, cu_k, scale=scale)


def _fake(q, latents, cu_q, lens_k, *rest):
    latent = next(x for x in rest if type(x) is int)
    lse = wide_dtype(q.dtype)
    return q.new_empty(*q.shape[:2], latent), q.new_empty(q.shape[1], q.shape[0], dtype=lse)


@custom_op(
    "latent_attention_backward",
    lambda q, latents, *rest: (q.new_empty(q.shape), latents.new_empty(latents.shape)),
    no_gradient=("latent_attention", SECOND),
)
def gradients(
    q: Tensor, latents: Tensor, cu_q: Tensor, cu_k: Tensor, out: Tensor, lse: Tensor, do: Tensor,
    latent: int, scale: float, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(dq, dlatents)."""
    record("latent_attention_backward", backend)
    if backend != "torch":
        return _on_triton().backward(q, latents, cu_q, cu_k, latent, scale, out, lse, do)
    begins = cu_k.tolist()
    lengths = [b - a for a, b in pairwise(begins)]
    keys = latents[:, None]
    dq, dk, dv = portable.gradients(
        q, keys, keys[..., :latent], cu_q, begins[:-1], lengths, True, scale, None, out, lse, do
    )
    dk[..., :latent] += dv
    wide = wide_dtype(q.dtype)
    return dq, dk[:, 0].to(wide).to(latents.dtype)


@custom_op("latent_attention", _fake, gradients=(4, gradients, True))
def _latent_attention(
    q: Tensor, latents: Tensor, cu_q: Tensor, cu_k: Tensor, latent: int, scale: float, backend: str
) -> tuple[Tensor, Tensor]:
    """(out, lse)."""
    record("latent_attention", backend)
    if backend != "torch":
        return _on_triton().forward(q, latents, cu_q, cu_k, None, latent, scale)
    begins = cu_k.tolist()
    lengths = [b - a for a, b in pairwise(begins)]
    keys = latents[:, None]
    return portable.forward(
        q, keys, keys[..., :latent], cu_q, begins[:-1], lengths, None, 1, True, scale, None
    )


@custom_op(
    "paged_latent_attention",
    _fake,
    no_gradient=("paged_latent_attention", "it has no gradient; latent_attention has one"),
)
def _paged_latent_attention(
    q: Tensor, cache: Tensor, cu_q: Tensor, lens: Tensor, table: Tensor, latent: int, scale: float,
    backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse)."""
    record("paged_latent_attention", backend)
    if backend != "torch":
        return _on_triton().forward(q, cache, cu_q, lens, table, latent, scale)
    keys, lengths = cache.reshape(-1, 1, cache.shape[2]), lens.tolist()
    return portable.forward(
        q, keys, keys[..., :latent], cu_q, [0] * len(lengths), lengths, table, cache.shape[1], True,
        scale, None,
    )  # fmt: skip


def _checked(op: str, q: Tensor, latents: Tensor, latent: int, scale: float) -> None:
    """Raises if the arguments do not fit together."""
    if q.dim() != 3 or latents.shape[-1:] != q.shape[2:]:
        raise UnsupportedShape(
            f"{op}: q {tuple(q.shape)} and latents {tuple(latents.shape)} do not fit together; q "
            "[T, H, L + R] and as many features of a key are needed"
        )
    rotated = q.shape[2] - latent
    if not 0 < latent <= MAX_LATENT or not 0 < rotated <= MAX_ROTATED:
        raise UnsupportedShape(
            f"{op}: latents of {latent} features with {rotated} rotated ones; 1..{MAX_LATENT} and "
            f"1..{MAX_ROTATED} are supported"
        )
    if q.dtype != latents.dtype or not q.is_floating_point():
        raise UnsupportedDtype(
            f"{op}: q and latents are {q.dtype} and {latents.dtype}; one floating dtype is needed"
        )
    if not scale > 0:
        raise ValueError(f"{op}: scale must be above 0, not {scale}")


def latent_attention(
    q: Tensor,
    latents: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    latent: int,
    scale: float,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """out[T, H, L], or (out, lse[H, T] in fp32) of q[T, H, L + R] and latents[S, L + R], with
    L = latent.

    q, latents: bfloat16, float16, float32 (float64 on the torch backend); L <= 512 and R <= 128.
    cu_seqlens_q, cu_seqlens_k: [B + 1] integers, the begins of the sequences. The result is
    differentiable in q and latents; lse has no gradient. cu_seqlens beyond q or latents raise on
    the torch backend and are not checked on a GPU. Rows of q outside every sequence are undefined
    on a GPU and 0 on the torch backend, and have gradients of 0. Raises UnsupportedShape,
    UnsupportedDtype, ValueError, and what `backend.choose` raises.
    """
    _checked("latent_attention", q, latents, latent, scale)
    if latents.dim() != 2:
        raise UnsupportedShape(
            f"latent_attention: latents[S, L + R] are needed, not {tuple(latents.shape)}"
        )
    cu_q = int32_vector("latent_attention", "cu_seqlens_q", cu_seqlens_q)
    cu_k = int32_vector("latent_attention", "cu_seqlens_k", cu_seqlens_k, cu_q.numel())
    chosen = choose("latent_attention", backend, q, latents, cu_q, cu_k)
    q, latents = last_dense(q), last_dense(latents)
    out, lse = call(_latent_attention, q, latents, cu_q, cu_k, latent, float(scale), chosen)
    return (out, lse) if return_lse else out


def paged_latent_attention(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    cu_seqlens_q: Tensor,
    latent: int,
    scale: float,
    backend: str | None = None,
) -> Tensor:
    """out[T, H, L] of q[T, H, L + R] over a paged cache[blocks, P, L + R]; the bits of
    `latent_attention`.

    block_table[B, most blocks of a sequence]; context_lens[B]: the numbers of keys, including those
    of the queries, which are in the cache already. Slots after a sequence's last key never affect a
    result. There is no gradient. A table with too few blocks, or with a block that the cache lacks,
    raises on the torch backend and is not checked on a GPU. Rows of q outside every sequence are
    undefined on a GPU and 0 on the torch backend. Raises UnsupportedShape, UnsupportedDtype,
    ValueError, and what `backend.choose` raises.
    """
    op = "paged_latent_attention"
    _checked(op, q, cache, latent, scale)
    if cache.dim() != 3 or cache.shape[1] == 0 or block_table.dim() != 2:
        raise UnsupportedShape(
            f"{op}: cache[blocks, P, L + R] and block_table[B, n] are needed, not "
            f"{tuple(cache.shape)} and {tuple(block_table.shape)}"
        )
    if block_table.dtype not in (torch.int32, torch.int64):
        raise UnsupportedShape(f"{op}: block_table must have integers, not {block_table.dtype}")
    cu_q = int32_vector(op, "cu_seqlens_q", cu_seqlens_q, block_table.shape[0] + 1)
    lens = int32_vector(op, "context_lens", context_lens, block_table.shape[0])
    table = last_dense(block_table.to(torch.int32))
    chosen = choose(op, backend, q, cache, table, lens, cu_q)
    q, cache = last_dense(q), last_dense(cache)
    out, _ = call(
        _paged_latent_attention, q, cache, cu_q, lens, table, latent, float(scale), chosen
    )
    return out
