"""attention with sequences divided among ranks (context parallelism), with the bits of one rank.

Every rank has some rows of each sequence, with all heads. Ranks exchange rows, so that each rank
has all rows of some heads, run `attention` as on one rank, and send the outputs back. Attention
never mixes heads, and rows are copied, so outputs and the gradients of q, k and v have the bits of
one rank, whatever the order of sums. (Gradients of weights are sums over rows outside of attention,
and the trainer adds them up over ranks.)

Rows are divided as in Megatron: a sequence is cut into 2 R equal parts, and rank r has the parts r
and 2 R - 1 - r, so that all ranks have the same work in causal attention.

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


def owners(cu: Tensor, rows: int, ranks: int) -> tuple[Tensor, Tensor]:
    """(rank, index among this rank's rows) of each row 0 .. rows - 1 of the sequences that begin at
    cu[B + 1], int64, for 2 ranks or more. Does not wait for the device; `check_lengths` checks that
    the ranks divide the sequences."""
    cu, at = cu.long(), torch.arange(rows, device=cu.device)
    sequence = torch.searchsorted(cu, at, right=True) - 1
    begin = cu[sequence]
    part = ((cu[(sequence + 1).clamp(max=cu.numel() - 1)] - begin) // (2 * ranks)).clamp(min=1)
    number, within = (at - begin) // part, (at - begin) % part
    rank = torch.minimum(number, 2 * ranks - 1 - number)
    return rank, begin // ranks + torch.where(number < ranks, 0, part) + within


def check_lengths(cu: Tensor, rows: int, ranks: int) -> None:
    """Raises UnsupportedShape if `ranks` do not divide the sequences, or if the sequences do not
    cover all `rows`. Waits for the device."""
    bounds = cu.tolist()
    wrong = [b - a for a, b in pairwise(bounds) if (b - a) % (2 * ranks)]
    if wrong:
        raise UnsupportedShape(
            f"sequences of {wrong} rows cannot be divided among {ranks} ranks: pad each to a "
            f"multiple of {2 * ranks}"
        )
    if bounds[0] != 0 or bounds[-1] != rows:
        raise UnsupportedShape(
            f"sequences from row {bounds[0]} to {bounds[-1]} do not cover all {rows} rows"
        )


def own_positions(cu: Tensor, rows: int, group: Group) -> Tensor:
    """int64 [rows / R]: the position of each row of this rank in its sequence. rows: the number of
    rows of all ranks."""
    cu, at = cu.long(), torch.arange(rows, device=cu.device)
    positions = at - cu[torch.searchsorted(cu, at, right=True) - 1]
    ranks = size_of(group)
    if ranks == 1:
        return positions
    shared = torch.empty(ranks, rows // ranks, dtype=torch.int64, device=cu.device)
    shared[owners(cu, rows, ranks)] = positions
    return shared[rank_of(group)]


def _to_heads(x: Tensor, order: Tensor, group: Any) -> Tensor:
    """[T, H / R, D], all rows of this rank's heads, from x[T / R, H, D]."""
    parts = x.unflatten(1, (size_of(group), -1)).movedim(1, 0)
    return all_to_all(parts, group).flatten(0, 1).index_select(0, order)


def _to_rows(x: Tensor, order: Tensor, group: Any) -> Tensor:
    """[T / R, H, D], this rank's rows of all heads, from x[T, H / R, D]: the inverse of
    `_to_heads`."""
    parts = torch.empty_like(x, memory_format=torch.contiguous_format)
    parts[order] = x
    received = all_to_all(parts.unflatten(0, (size_of(group), -1)), group)
    return received.movedim(0, 1).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    """One of the two exchanges. The gradient of each is the other exchange."""

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
    """Causal attention out[T / R, Hq, D] of this rank's rows q[T / R, Hq, D], k and v[T / R, Hk,
    D]. cu[B + 1]: where each whole sequence begins among all T rows, the same on all ranks.

    Call this, and its backward, on all ranks of the group; None is one rank. The length of every
    sequence must be a multiple of 2 R, and the sequences must cover all rows. `check_lengths`
    checks this, and is not called here because it waits for the device. With fewer key-value heads
    than ranks, each head is on R / Hk ranks, whose gradients are added up: these gradients repeat,
    but do not have the bits of one rank. Raises UnsupportedShape if R ranks do not divide the
    heads, and the errors of `attention`."""

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
            f"{q.shape[1]} query heads and {k.shape[1]} key-value heads cannot be divided among "
            f"{ranks} ranks"
        )
    if heads < ranks:
        k, v = (x.repeat_interleave(ranks // heads, dim=1) for x in (k, v))
    rank, index = owners(cu, q.shape[0] * ranks, ranks)
    order = rank * q.shape[0] + index
    whole = (_Exchange.apply(x, order, group, True) for x in (q, k, v))
    out = attend(*whole)
    return _Exchange.apply(out, order, group, False)
