"""embedding with its table divided among ranks: y[t] = weight[ids[t]], with the bits of the table.

Every rank looks up all ids, gathers the results of all ranks, and takes the row of the rank that
has the id. (Adding zeros from the other ranks would turn -0 into +0.)

Gradient: that of `embedding`, for this rank's rows.

T = tokens (all dimensions of ids)   V = vocabulary   H = features   R = ranks
"""

from typing import Any

import torch
from torch import Tensor

from rlk_kernels.backend import choose
from rlk_kernels.custom_op import on_device_of
from rlk_kernels.ops.embedding.operator import embedding, embedding_grad
from rlk_kernels.parallel.copies import Group, gather, rank_of, size_of


def local_ids(ids: Tensor, rank: int, rows: int) -> tuple[Tensor, Tensor]:
    """(the row of each id in this rank's shard, or 0; whether the shard has the id)."""
    local = ids - rank * rows
    here = (local >= 0) & (local < rows)
    return torch.where(here, local, 0), here


def of_owner(parts: Tensor, ids: Tensor, rows: int) -> Tensor:
    """[..., H]: the row of the rank that has each id of ids[...], copied from parts[R, ..., H], the
    rows of all ranks. An id that no rank has raises IndexError on a CPU, as in `embedding`."""
    owner = torch.where(ids < 0, len(parts), ids // rows).flatten()
    tokens = torch.arange(ids.numel(), device=ids.device)
    return parts.flatten(1, -2)[owner, tokens].view(parts.shape[1:])


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, group: Group, backend: str) -> Tensor:
        rows = weight.shape[0]
        local, here = local_ids(ids, rank_of(group), rows)
        # Ids of other ranks get a row after the last one.
        ctx.save_for_backward(torch.where(here, local, rows))
        ctx.rows, ctx.backend = rows, backend
        return of_owner(gather(embedding(local, weight, backend=backend), group), ids, rows)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (local,) = ctx.saved_tensors
        with on_device_of(dy):
            grad = embedding_grad(
                local.flatten(), dy.reshape(-1, dy.shape[-1]), ctx.rows + 1, ctx.backend
            )
        return None, grad[:-1], None, None


def embedding_parallel(
    ids: Tensor, weight: Tensor, group: Group, *, backend: str | None = None
) -> Tensor:
    """y[..., H] for ids[...] and weight[V / R, H], this rank's rows of the table. Call this on all
    ranks of the group with the same ids, and its backward with the same dy; None is one rank."""
    if size_of(group) == 1:
        return embedding(ids, weight, backend=backend)
    return _Embedding.apply(ids, weight, group, choose("embedding", backend, weight, ids))
