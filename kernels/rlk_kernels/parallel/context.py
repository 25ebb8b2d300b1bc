"""attention with its sequences shared by ranks (context parallelism), with the bits of one rank.

Every rank has some rows of each sequence, of all heads. Ranks exchange them, so that each has all
rows of its share of heads, runs `attention` as one rank does, and what comes out goes back. Heads
do not meet in attention, and rows are copied: outputs and the gradients of q, k and v have the bits
of one rank, whatever the order of sums is. (Sums over rows outside of attention, those of weights,
are added up over ranks by whoever adds up gradients.)

Rows are shared in Megatron's way: a sequence is cut into 2 R equal parts, of which rank r has the
parts r and 2 R - 1 - r, so that causal attention gives all ranks as much to do.

T = rows of all sequences   Hq, Hk = heads   D = head size   R = ranks
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rlk_kernels.errors import UnsupportedShape
from rlk_kernels.ops.attention.operator import attention
from rlk_kernels.parallel.collectives import all_to_all
from rlk_kernels.parallel.copies import Group, rank_of, size_of


def places(cu: Tensor, rows: int, ranks: int) -> tuple[Tensor, Tensor]:
    """(rank, index among its rows) of each row 0 .. rows - 1 of the sequences that begin at
    cu[B + 1], int64, of 2 ranks or more. The device is not waited for: `check_lengths` says whether
    they can be shared."""
    cu, at = cu.long(), torch.arange(rows, device=cu.device)
    sequence = torch.searchsorted(cu, at, right=True) - 1
    begin = cu[sequence]
    part = ((cu[(sequence + 1).clamp(max=cu.numel() - 1)] - begin) // (2 * ranks)).clamp(min=1)
    number, within = (at - begin) // part, (at - begin) % part
    rank = torch.minimum(number, 2 * ranks - 1 - number)
    return rank, begin // ranks + torch.where(number < ranks, 0, part) + within


def check_lengths(cu: Tensor, rows: int, ranks: int) -> None:
    """Raises UnsupportedShape where `ranks` cannot share the sequences, which are to be all of
    `rows`. Waits for the device."""
    bounds = cu.tolist()
    wrong = [b - a for a, b in pairwise(bounds) if (b - a) % (2 * ranks)]
    if wrong:
        raise UnsupportedShape(
            f"sequences of {wrong} rows cannot be shared by {ranks} ranks: pad each to a multiple "
            f"of {2 * ranks}"
        )
    if bounds[0] != 0 or bounds[-1] != rows:
        raise UnsupportedShape(
            f"sequences from row {bounds[0]} to {bounds[-1]} are not all of {rows} rows"
        )


def own_positions(cu: Tensor, rows: int, group: Group) -> Tensor:
    """int64 [rows / R]: the position in its sequence of each row of this rank, of `rows` in all."""
    cu, at = cu.long(), torch.arange(rows, device=cu.device)
    positions = at - cu[torch.searchsorted(cu, at, right=True) - 1]
    ranks = size_of(group)
    if ranks == 1:
        return positions
    shared = torch.empty(ranks, rows // ranks, dtype=torch.int64, device=cu.device)
    shared[places(cu, rows, ranks)] = positions
    return shared[rank_of(group)]


def _to_heads(x: Tensor, order: Tensor, group: Any) -> Tensor:
    """[T, H / R, D], all rows of this rank's heads, of x[T / R, H, D]."""
    parts = x.unflatten(1, (size_of(group), -1)).movedim(1, 0)
    return all_to_all(parts, group).flatten(0, 1).index_select(0, order)


def _to_rows(x: Tensor, order: Tensor, group: Any) -> Tensor:
    """[T / R, H, D], this rank's rows of all heads, of x[T, H / R, D]: the inverse."""
    parts = torch.empty_like(x, memory_format=torch.contiguous_format)
    parts[order] = x
    received = all_to_all(parts.unflatten(0, (size_of(group), -1)), group)
    return received.movedim(0, 1).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    """One of both, and the other one as its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, group: Any, gathers_rows: bool) -> Tensor:
        ctx.save_for_backward(order)
        ctx.group, ctx.gathers_rows = group, gathers_rows
        return (_to_heads if gathers_rows else _to_rows)(x, order, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (order,) = ctx.saved_tensors
        back = _to_rows if ctx.gathers_rows else _to_heads
        return back(dy.contiguous(), order, ctx.group), None, None, None


def context_attention(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, group: Group, *, scale: float | None = None,
    window: int | None = None, softcap: float | None = None, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """out[T / R, Hq, D] of this rank's rows, q[T / R, Hq, D], k and v[T / R, Hk, D]; causal.
    cu[B + 1]: where each whole sequence begins among all T rows, the same on all ranks.

    Called on all ranks of the group, and its backward too; None is one rank. Every sequence is a
    multiple of 2 R rows, and they are all rows: `check_lengths`, which is not asked here because it
    waits for the device. Where there are fewer key-value heads than ranks, each is on R / Hk of
    them, whose gradients of it are added up: those repeat, and are not the bits of one rank. Raises
    UnsupportedShape where R ranks cannot share the heads, and what `attention` raises.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attention(
            q, k, v, cu, cu, scale=scale, window=window, softcap=softcap, backend=backend
        )

    ranks = size_of(group)
    if ranks == 1:
        return attend(q, k, v)
    heads = k.shape[1]
    if q.shape[1] % ranks or (heads % ranks and ranks % heads):
        raise UnsupportedShape(
            f"{q.shape[1]} query heads and {k.shape[1]} key-value heads cannot be shared by "
            f"{ranks} ranks"
        )
    if heads < ranks:
        k, v = (x.repeat_interleave(ranks // heads, dim=1) for x in (k, v))
    rank, index = places(cu, q.shape[0] * ranks, ranks)
    order = rank * q.shape[0] + index
    whole = (_Exchange.apply(x, order, group, True) for x in (q, k, v))
    out = attend(*whole)
    return _Exchange.apply(out, order, group, False)
