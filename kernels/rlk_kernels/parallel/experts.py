"""The experts of a sparse layer, divided among ranks: rank r of R has E / R experts from r E / R
on.

A token's row is copied to the ranks of its experts, and the experts' rows are copied back, rounded
as on one rank; the token's rank adds them up in ascending id. No sum crosses ranks, so the bits are
those of one rank, for any number of ranks.

Gradients take the same paths: those of a token's rows come back rounded, and the token's rank adds
them up in ascending id. An expert's rows are ordered by rank and then by token, so the gradient of
its weights is that of one rank with the tokens of all ranks one after another.

The host reads the number of rows for each rank once in each layer.

T = tokens of this rank   k = experts of a token   E = experts of all ranks   H = features
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlk_kernels.backend import choose
from rlk_kernels.custom_op import on_device_of
from rlk_kernels.errors import UnsupportedShape
from rlk_kernels.ops.combine.operator import sum_slots
from rlk_kernels.ops.experts.operator import group_by_expert
from rlk_kernels.parallel.copies import Group, gather, rank_of, size_of

Counts = list[int]
"""Rows to, or from, each rank."""


def _sent(x: Tensor, to: Counts, of: Counts, group: Group) -> Tensor:
    """The rows that this rank receives, in rank order. x[sum(to), ...]: the rows that it sends, in
    the order of their ranks."""
    out = x.new_empty(sum(of), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), of, to, group=group)
    return out


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, to: Counts, of: Counts, group: Group) -> Tensor:
        ctx.back = of, to, group
        return _sent(x, to, of, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _sent(dy, *ctx.back), None, None, None


class _RowsOfSlots(torch.autograd.Function):
    """x[slots // k], whose gradients are added up in the order of `grouped_linear`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, k: int, backend: str) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.shape, ctx.backend = (x.shape[0], k, x.shape[1]), backend
        return x[slots // k]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (slots,) = ctx.saved_tensors
        rows = dy.new_zeros(ctx.shape[0] * ctx.shape[1], ctx.shape[2])
        rows[slots] = dy
        with on_device_of(dy):
            return sum_slots(rows.view(ctx.shape), ctx.backend), None, None, None


def experts_parallel(
    x: Tensor, ids: Tensor, experts: int, group: Group, compute: Callable[[Tensor, Tensor], Tensor],
    *, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """rows[T, k, H] for x[T, H] and ids int32 [T, k], the experts of all ranks; zeros for dropped
    slots. compute(x[S, H], ids int32 [S, 1]) returns the rows [S, 1, H] of this rank's experts,
    which are numbered from 0; it is called on every rank, also with S = 0. Call this on all ranks.

    Raises UnsupportedShape if the ranks do not divide the experts.
    """
    world = size_of(group)
    if experts % world:
        raise UnsupportedShape(f"experts_parallel: {world} ranks do not divide {experts} experts")
    share, k = experts // world, ids.shape[1]
    order, bounds = group_by_expert(ids, experts, backend=backend)[1:]
    to = bounds[::share].diff().tolist()
    of = gather(torch.tensor(to, device=x.device), group)[:, rank_of(group)].tolist()
    slots = order[: sum(to)].long()
    rows = _RowsOfSlots.apply(x, slots, k, choose("experts_parallel", backend, x))
    local_ids = _sent(ids.flatten()[slots], to, of, group) - rank_of(group) * share
    computed = compute(_Send.apply(rows, to, of, group), local_ids[:, None])
    back = _Send.apply(computed.squeeze(1), of, to, group)
    out = back.new_zeros(ids.numel(), back.shape[1]).index_copy(0, slots, back)
    return out.view(*ids.shape, back.shape[1])
