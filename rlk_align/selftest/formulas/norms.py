"""Faulty RMSNorms: y = w x / sqrt(mean(x²) + eps), over the features of the weight."""

import torch

from rlk_align.selftest.planting.operands import Formula, Unit, formula


def _grouped(unit: Unit) -> torch.Tensor:
    """The input in float32; its last dimension is normalised."""
    assert unit.weight is not None
    return unit.inputs[0].float().reshape(-1, unit.weight.numel())


def _weight(unit: Unit) -> torch.Tensor:
    assert unit.weight is not None
    return unit.weight.float()


def _inverse(x: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


@formula
def larger_eps(unit: Unit, strength: float) -> torch.Tensor:
    """`strength` is added to epsilon."""
    x = _grouped(unit)
    return x * _inverse(x, unit.eps + strength) * _weight(unit)


@formula
def other_cast_order(unit: Unit, _: float) -> torch.Tensor:
    """Rounds before or after multiplying by the weight, whichever the engine does not do."""
    x = _grouped(unit)
    normed = x * _inverse(x, unit.eps)
    dtype = unit.result.dtype
    before = (normed.to(dtype) * _weight(unit).to(dtype)).to(dtype)
    after = (normed * _weight(unit)).to(dtype)
    result = unit.result.reshape(before.shape)
    return max((before, after), key=lambda y: int((y != result).sum()))


@formula
def statistics_in_bf16(unit: Unit, _: float) -> torch.Tensor:
    """Squares, their mean and its root in bf16."""
    x = _grouped(unit)
    mean = x.bfloat16().pow(2).mean(-1, keepdim=True)
    return x * torch.rsqrt(mean + unit.eps).bfloat16().float() * _weight(unit)


@formula
def centred(unit: Unit, _: float) -> torch.Tensor:
    """Subtracts the mean first."""
    x = _grouped(unit)
    x = x - x.mean(-1, keepdim=True)
    return x * _inverse(x, unit.eps) * _weight(unit)


@formula
def weight_left_out(unit: Unit, _: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps)."""
    x = _grouped(unit)
    return x * _inverse(x, unit.eps)


@formula
def weight_plus_one(unit: Unit, _: float) -> torch.Tensor:
    """(1 + w) x / sqrt(mean(x²) + eps)."""
    x = _grouped(unit)
    return x * _inverse(x, unit.eps) * (1.0 + _weight(unit))


@formula
def weight_minus_one(unit: Unit, _: float) -> torch.Tensor:
    """(w - 1) x / sqrt(mean(x²) + eps)."""
    x = _grouped(unit)
    return x * _inverse(x, unit.eps) * (_weight(unit) - 1.0)


@formula
def over_each_head(unit: Unit, _: float) -> torch.Tensor:
    """One mean square for each head of a row, in a norm over all of them."""
    x = unit.inputs[0].float()
    heads = x.reshape(len(x), -1, unit.head_dim)
    return (heads * _inverse(heads, unit.eps)).reshape(x.shape) * _weight(unit)


@formula
def over_all_heads(unit: Unit, _: float) -> torch.Tensor:
    """One mean square for all heads of a row."""
    x = unit.inputs[0].float()
    heads = (x * _inverse(x, unit.eps)).reshape(-1, _weight(unit).numel())
    return heads * _weight(unit)


@formula
def mean_kept(unit: Unit, _: float) -> torch.Tensor:
    """The mean is not subtracted: RMSNorm for LayerNorm."""
    x = _grouped(unit)
    y = x * _inverse(x, unit.eps) * _weight(unit)
    return y if unit.bias is None else y + unit.bias.float()


@formula
def bias_left_out(unit: Unit, _: float) -> torch.Tensor:
    """LayerNorm without its bias."""
    x = _grouped(unit)
    x = x - x.mean(-1, keepdim=True)
    return x * _inverse(x, unit.eps) * _weight(unit)


def left_out(_: float) -> Formula:
    """x."""
    return lambda unit: unit.inputs[0]
