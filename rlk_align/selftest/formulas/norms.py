"""Faulty RMSNorms: y = w x / sqrt(mean(x²) + eps), over the features of the weight."""

import torch

from rlk_align.selftest.planting.operands import Formula, Unit


def _grouped(unit: Unit) -> torch.Tensor:
    """The input in float32, its last dimension the one that is normed."""
    assert unit.weight is not None
    return unit.inputs[0].float().reshape(-1, unit.weight.numel())


def _weight(unit: Unit) -> torch.Tensor:
    assert unit.weight is not None
    return unit.weight.float()


def _inverse(x: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def larger_eps(strength: float) -> Formula:
    """`strength` is added to epsilon."""

    def formula(unit: Unit) -> torch.Tensor:
        x = _grouped(unit)
        return x * _inverse(x, unit.eps + strength) * _weight(unit)

    return formula


def other_cast_order(_: float) -> Formula:
    """Rounds before the weight or after it: whichever the engine does not."""

    def formula(unit: Unit) -> torch.Tensor:
        x = _grouped(unit)
        normed = x * _inverse(x, unit.eps)
        dtype = unit.result.dtype
        before = (normed.to(dtype) * _weight(unit).to(dtype)).to(dtype)
        after = (normed * _weight(unit)).to(dtype)
        result = unit.result.reshape(before.shape)
        return max((before, after), key=lambda y: int((y != result).sum()))

    return formula


def statistics_in_bf16(_: float) -> Formula:
    """Squares, their mean and its root in bf16."""

    def formula(unit: Unit) -> torch.Tensor:
        x = _grouped(unit)
        mean = x.bfloat16().pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(mean + unit.eps).bfloat16().float() * _weight(unit)

    return formula


def centred(_: float) -> Formula:
    """Subtracts the mean first."""

    def formula(unit: Unit) -> torch.Tensor:
        x = _grouped(unit)
        x = x - x.mean(-1, keepdim=True)
        return x * _inverse(x, unit.eps) * _weight(unit)

    return formula


def weight_left_out(_: float) -> Formula:
    """x / sqrt(mean(x²) + eps)."""

    def formula(unit: Unit) -> torch.Tensor:
        x = _grouped(unit)
        return x * _inverse(x, unit.eps)

    return formula


def weight_plus_one(_: float) -> Formula:
    """(1 + w) x / sqrt(mean(x²) + eps)."""

    def formula(unit: Unit) -> torch.Tensor:
        x = _grouped(unit)
        return x * _inverse(x, unit.eps) * (1.0 + _weight(unit))

    return formula


def over_all_heads(_: float) -> Formula:
    """One mean square for all heads of a row."""

    def formula(unit: Unit) -> torch.Tensor:
        x = unit.inputs[0].float()
        heads = (x * _inverse(x, unit.eps)).reshape(-1, _weight(unit).numel())
        return heads * _weight(unit)

    return formula


def left_out(_: float) -> Formula:
    """x."""
    return lambda unit: unit.inputs[0]
