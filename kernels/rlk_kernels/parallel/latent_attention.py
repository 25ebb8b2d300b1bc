"""latent_attention with heads divided among ranks, with the bits of one rank.

Every rank has all latents, and the queries of some heads. An output belongs to one head. The
gradient of latents is a sum over heads: for it the ranks gather the queries of all heads, each
computes the gradients of all, and keeps those of its own queries.

T = queries of all sequences   S = keys of all sequences   H = heads of this rank
L = features of a latent   R = rotated features
"""

from typing import Any

import torch
from torch import Tensor

from rlk_kernels.backend import choose
from rlk_kernels.custom_op import on_device_of
from rlk_kernels.ops.latent_attention.operator import gradients, latent_attention
from rlk_kernels.parallel.copies import Group, gather, rank_of, size_of


class _SharedHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, latents: Tensor, cu_q: Tensor, cu_k: Tensor, latent: int, scale: float,
        group: Group,
    ) -> Tensor:  # fmt: skip
        ctx.latent, ctx.scale, ctx.group = latent, scale, group
        ctx.backend = choose("latent_attention", None, q, latents, cu_q, cu_k)
        out, lse = latent_attention(
            q, latents, cu_q, cu_k, latent=latent, scale=scale, return_lse=True, backend=ctx.backend
        )
        ctx.save_for_backward(q, latents, cu_q, cu_k, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        q, latents, cu_q, cu_k, out, lse = ctx.saved_tensors
        of_all = [_all_heads(x, ctx.group) for x in (q, out, do)]
        bounds = (cu.to(torch.int32).contiguous() for cu in (cu_q, cu_k))
        with on_device_of(q):
            dq, dlatents = gradients(
                of_all[0], latents.contiguous(), *bounds, of_all[1],
                gather(lse, ctx.group).flatten(0, 1), of_all[2], ctx.latent, ctx.scale, ctx.backend,
            )  # fmt: skip
        own = dq.chunk(size_of(ctx.group), 1)[rank_of(ctx.group)]
        return own.contiguous(), dlatents, None, None, None, None, None


def _all_heads(x: Tensor, group: Group) -> Tensor:
    """[T, R H, D] from x[T, H, D]: the heads of all R ranks."""
    return gather(x.contiguous(), group).movedim(0, 1).flatten(1, 2).contiguous()


def latent_attention_by_heads(
    q: Tensor, latents: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, group: Group, *,
    latent: int, scale: float,
) -> Tensor:  # fmt: skip
    """out[T, H, L] of this rank's q[T, H, L + R] and of latents[S, L + R], which are equal on all
    ranks, as is their gradient. Call this on all ranks of the group; None is one rank. Raises as
    `latent_attention`."""
    if size_of(group) == 1:
        return latent_attention(q, latents, cu_seqlens_q, cu_seqlens_k, latent=latent, scale=scale)
    return _SharedHeads.apply(q, latents, cu_seqlens_q, cu_seqlens_k, latent, scale, group)
