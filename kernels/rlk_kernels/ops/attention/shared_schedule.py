"""A list of pieces (`schedule.py`) that several calls share, such as the layers of a pass."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlk_kernels.errors import UnsupportedShape

NAMES = ("q", "dtype", "a block of the cache", "block_table", "window", "a softcap")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The result of `paged_schedule`: a list of work on the device, for the tables and lengths that
    it was made with."""

    plan: Tensor
    """int32, flat: the entries of the list."""
    pieces: Tensor
    """int32, flat: the pieces of work."""
    special: bool
    """Whether it is for the kernels for Hopper."""
    made_for: tuple
    """The `shape_key` that a call must have."""


def shape_key(q: Tensor, k_cache: Tensor, table: Tensor, window: int | None, capped: bool) -> tuple:
    """What the size and the form of a list depend on, besides the device and the layout of the
    caches."""
    return q.shape, q.dtype, k_cache.shape[1:], table.shape, window, capped


def check_schedule(schedule: Schedule, wanted: tuple) -> None:
    """Raise UnsupportedShape if a schedule was made for calls with another `shape_key`."""
    if schedule.made_for != wanted:
        differ = ", ".join(
            f"{name} {_readable(theirs)} and not {_readable(ours)}"
            for name, theirs, ours in zip(NAMES, schedule.made_for, wanted, strict=True)
            if theirs != ours
        )
        raise UnsupportedShape(
            f"paged_attention: the schedule was made for {differ}; make one with paged_schedule "
            "from tensors of this call's shapes"
        )


def _readable(x: object) -> object:
    return tuple(x) if isinstance(x, torch.Size) else x
