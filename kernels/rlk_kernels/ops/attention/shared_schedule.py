"""A list of pieces (`schedule.py`) that several calls share: the layers of one pass."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlk_kernels.errors import UnsupportedShape

NAMES = ("q", "dtype", "a block of the cache", "block_table", "window", "a softcap")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What `paged_schedule` makes: which queries attend to which keys, on the device, for the
    tables and lengths that it was made with."""

    plan: Tensor
    """int32, flat: the list's entries."""
    pieces: Tensor
    """int32, flat: the pieces of work."""
    special: bool
    """For the kernels written for Hopper."""
    made_for: tuple
    """What a call must have in common with the one that it was made for: `shape_key`."""


def shape_key(q: Tensor, k_cache: Tensor, table: Tensor, window: int | None, capped: bool) -> tuple:
    """What the size and the form of a list follow from, besides the device and the layout of the
    caches."""
    return q.shape, q.dtype, k_cache.shape[1:], table.shape, window, capped


def check_schedule(schedule: Schedule, wanted: tuple) -> None:
    """Raise UnsupportedShape where a schedule was made for calls of another `shape_key`."""
    if schedule.made_for != wanted:
        differ = ", ".join(
            f"{name} {_said(theirs)} and not {_said(ours)}"
            for name, theirs, ours in zip(NAMES, schedule.made_for, wanted, strict=True)
            if theirs != ours
        )
        raise UnsupportedShape(
            f"paged_attention: the schedule was made for {differ}; make one with paged_schedule "
            "from tensors of this call's shapes"
        )


def _said(x: object) -> object:
    return tuple(x) if isinstance(x, torch.Size) else x
