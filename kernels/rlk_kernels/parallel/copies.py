"""Copies between ranks: no arithmetic, every bit kept. They go through `collectives`.

R = ranks of the group; a group of None is one rank
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
    """[R, ...]: every rank's x, in rank order; all are of one shape."""
    return x[None] if group is None else all_gather(x, group)


def gather_columns(x: Tensor, group: Group, blocks: int = 1) -> Tensor:
    """[..., R F] of x[..., F]: the ranks' columns side by side. With `blocks`, x consists of so
    many equal blocks, and all ranks' columns of one stand together, as on one rank."""
    parts = gather(x.unflatten(-1, (blocks, -1)), group)
    return parts.movedim(0, -2).flatten(-3)


def gather_rows(x: Tensor, group: Group) -> Tensor:
    """[R S, ...] of x[S, ...]: the ranks' rows one after another."""
    return gather(x, group).flatten(0, 1)


def own_rows(x: Tensor, group: Group) -> Tensor:
    """[S / R, ...] of x[S, ...]: this rank's rows; the inverse of `gather_rows`."""
    return x.chunk(size_of(group))[rank_of(group)]


def columns_to_rows(x: Tensor, group: Group) -> Tensor:
    """[S / R, ..., R F] of x[S, ..., F]: all columns of this rank's rows, from all rows of its
    columns."""
    received = _exchange(x.unflatten(0, (size_of(group), -1)), group)
    return received.movedim(0, -2).flatten(-2)


def rows_to_columns(x: Tensor, group: Group, blocks: int = 1) -> Tensor:
    """[R S, F / R] of x[S, F]: all rows of this rank's columns. `blocks`: as `gather_columns`, of
    rows."""
    x = x.unflatten(0, (blocks, -1)).unflatten(-1, (size_of(group), -1))
    return _exchange(x.movedim(-2, 0), group).movedim(0, 1).flatten(0, 2)


def _exchange(parts: Tensor, group: Group) -> Tensor:
    """[R, ...]: part r of this rank's x goes to rank r; received parts are in rank order."""
    return parts if group is None else all_to_all(parts, group)
