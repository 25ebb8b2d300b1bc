"""Copies between ranks, by `collectives`. They keep every bit.

R = ranks of the group; the group None is one rank
"""

from typing import TypeAlias

import torch.distributed as dist
from torch import Tensor

from rlk_kernels.parallel.collectives import all_gather, all_to_all

Group: TypeAlias = dist.ProcessGroup | None


def size_of(group: Group) -> int:
    return 1 if group is None else group.size()


def rank_of(group: Group) -> int:
    return 0 if group is None else group.rank()


def gather(x: Tensor, group: Group) -> Tensor:
    """[R, ...]: the x of all ranks in rank order. All have the same shape."""
    return x[None] if group is None else all_gather(x, group)


def gather_columns(x: Tensor, group: Group, blocks: int = 1) -> Tensor:
    """[..., R F] from x[..., F]: the columns of all ranks side by side. If x consists of `blocks`
    equal blocks, the columns of a block are adjacent, as on one rank."""
    parts = gather(x.unflatten(-1, (blocks, -1)), group)
    return parts.movedim(0, -2).flatten(-3)


def gather_rows(x: Tensor, group: Group) -> Tensor:
    """[R S, ...] from x[S, ...]: the rows of all ranks one after another."""
    return gather(x, group).flatten(0, 1)


def own_rows(x: Tensor, group: Group) -> Tensor:
    """[S / R, ...] from x[S, ...]: this rank's rows; the inverse of `gather_rows`."""
    return x.chunk(size_of(group))[rank_of(group)]


def columns_to_rows(x: Tensor, group: Group) -> Tensor:
    """[S / R, ..., R F]: all columns of this rank's rows, from x[S, ..., F], all rows of its
    columns."""
    received = _exchange(x.unflatten(0, (size_of(group), -1)), group)
    return received.movedim(0, -2).flatten(-2)


def rows_to_columns(x: Tensor, group: Group, blocks: int = 1) -> Tensor:
    """[R S, F / R]: all rows of this rank's columns, from x[S, F], all columns of its rows. blocks:
    the number of blocks of rows, as in `gather_columns`."""
    x = x.unflatten(0, (blocks, -1)).unflatten(-1, (size_of(group), -1))
    return _exchange(x.movedim(-2, 0), group).movedim(0, 1).flatten(0, 2)


def _exchange(parts: Tensor, group: Group) -> Tensor:
    """[R, ...]: the received parts in rank order. parts[r] goes to rank r."""
    return parts if group is None else all_to_all(parts, group)
