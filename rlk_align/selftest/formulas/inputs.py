"""Faulty inputs: positions `[B, S]`, and ends of packed sequences."""

import torch

from rlk_align.selftest.planting.operands import Formula


def columns(_: float) -> Formula:
    """Positions count every column, padding included."""
    return lambda p: torch.arange(p.shape[1], device=p.device).expand_as(p)


def one_late(_: float) -> Formula:
    """The first sequence ends one token late."""

    def change(ends: torch.Tensor) -> torch.Tensor:
        moved = ends.clone()
        moved[1] += 1
        return moved

    return change
