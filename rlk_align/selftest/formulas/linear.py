"""Faulty projections: y = x wᵀ + b, the sum in float32; and faulty live weights."""

import torch

from rlk_align.selftest.formulas.rounding import through_fp8, through_int8, to_tf32
from rlk_align.selftest.planting.operands import Formula, Unit, formula


def _product(unit: Unit, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = x.float() @ weight.float().T
    return y if unit.bias is None else y + unit.bias.float()


def _weight(unit: Unit) -> torch.Tensor:
    assert unit.weight is not None
    return unit.weight


def _with_weight(change: Formula) -> Formula:
    """Computes with a changed weight. The weight is changed once, because an engine passes the same
    tensor as long as the fault is planted, and in the host's memory, because copies of a large
    head would not fit beside an engine that uses most of a GPU."""
    changed: dict[int, torch.Tensor] = {}

    def formula(unit: Unit) -> torch.Tensor:
        weight = _weight(unit)
        if id(weight) not in changed:
            changed[id(weight)] = change(weight.cpu()).to(weight.device)
        return _product(unit, unit.inputs[0], changed[id(weight)])

    return formula


def int8_weight(_: float) -> Formula:
    """The weight through int8."""
    return _with_weight(through_int8)


def fp8_weight(_: float) -> Formula:
    """The weight through fp8."""
    return _with_weight(through_fp8)


def stale(strength: float) -> Formula:
    """The weight before an update."""
    return _with_weight(stale_weight(strength))


def one_element(strength: float) -> Formula:
    """One element of the weight is changed."""
    return _with_weight(element_changed(strength))


def fp8_input(_: float) -> Formula:
    """The input through fp8."""
    return lambda unit: _product(unit, through_fp8(unit.inputs[0]), _weight(unit))


def tf32(_: float) -> Formula:
    """Both factors in TF32, in which tensor cores multiply float32."""
    return lambda unit: _product(unit, to_tf32(unit.inputs[0]), to_tf32(_weight(unit)))


def bf16_product(_: float) -> Formula:
    """Factors and product in bf16."""
    return lambda unit: _product(
        unit, unit.inputs[0].bfloat16(), _weight(unit).bfloat16()
    ).bfloat16()


@formula
def bf16_accumulation(unit: Unit, strength: float) -> torch.Tensor:
    """The sum is rounded to bf16 after every 1 / `strength` columns."""
    columns = round(1 / strength)
    total = torch.zeros_like(unit.result, dtype=torch.bfloat16)
    x, weight = unit.inputs[0].split(columns, -1), _weight(unit).split(columns, -1)
    for part, w in zip(x, weight, strict=True):
        total = (total.float() + part.float() @ w.float().T).bfloat16()
    return total if unit.bias is None else total.float() + unit.bias.float()


def bias_dropped(_: float) -> Formula:
    """x wᵀ."""
    return lambda unit: unit.inputs[0].float() @ _weight(unit).float().T


@formula
def stale_weight(weight: torch.Tensor, strength: float) -> torch.Tensor:
    """The weight plus a seeded update, whose norm is a share of the weight's."""
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    spread = strength * weight.float().std()
    return (weight.float() + spread * noise.to(weight.device)).to(weight.dtype)


@formula
def element_changed(weight: torch.Tensor, strength: float) -> torch.Tensor:
    """Element [5, 7] plus this many standard deviations."""
    changed = weight.clone()
    changed[5, 7] += (strength * weight.float().std()).to(weight.dtype)
    return changed


def ones(_: float) -> Formula:
    """All ones."""
    return torch.ones_like
