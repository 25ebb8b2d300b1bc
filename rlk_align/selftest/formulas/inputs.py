"""Faulty inputs: positions `[B, S]`, and ends of packed sequences."""

import torch

from rlk_align.selftest.planting.operands import Formula, formula


def columns(_: float) -> Formula:
    """Positions count every column, padding included."""
    return lambda p: torch.arange(p.shape[1], device=p.device).expand_as(p)


@formula
def one_late(ends: torch.Tensor, _: float) -> torch.Tensor:
    """The first sequence ends one token late."""
    moved = ends.clone()
    moved[1] += 1
    return moved
