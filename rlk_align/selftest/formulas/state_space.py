"""Faulty state-space models: dt = softplus(x + bias), S ← e^(A dt) S + dt x Bᵀ, y = S C + D x."""

import torch

from rlk_align.selftest.planting.operands import Unit, formula


@formula
def left_out(parameter: torch.Tensor, _: float) -> torch.Tensor:
    """The parameter is 0."""
    return torch.zeros_like(parameter)


@formula
def rounded_to_bf16(parameter: torch.Tensor, _: float) -> torch.Tensor:
    """The parameter is rounded to bf16."""
    return parameter.bfloat16().to(parameter.dtype)


@formula
def norm_before_gate(unit: Unit, _: float) -> torch.Tensor:
    """x is normed, in place of x silu(gate)."""
    x, gate = (y.float() for y in unit.inputs)
    return _normed(unit, x[:, None]) * torch.nn.functional.silu(gate)


@formula
def norm_by_group(unit: Unit, _: float) -> torch.Tensor:
    """Each half of the features is normed alone."""
    x, gate = (y.float() for y in unit.inputs)
    return _normed(unit, (x * torch.nn.functional.silu(gate)).unflatten(1, (2, -1)))


def _normed(unit: Unit, groups: torch.Tensor) -> torch.Tensor:
    """`[N, G, F / G]` -> `[N, F]`, times the weight."""
    assert unit.weight is not None
    scale = torch.rsqrt(groups.square().mean(-1, keepdim=True) + unit.eps)
    return (groups * scale).flatten(1) * unit.weight.float()
