"""Faulty rotary embeddings: features j and j + d/2 turn by position times frequency, or features
2j and 2j + 1 in families whose pairs are interleaved."""

from dataclasses import replace

import torch

from rlk_align.selftest.planting.operands import Formula, Unit, formula


def _angles(unit: Unit, later: torch.Tensor | float = 0.0) -> torch.Tensor:
    """float64 `[N, 1, pairs]`; `later`: positions added to each row's own."""
    assert unit.rows is not None
    assert unit.frequencies is not None
    positions = unit.rows.positions.double() + later
    return (positions[:, None] * unit.frequencies)[:, None]


def _heads(unit: Unit, first: bool = False) -> torch.Tensor:
    """The features that are rotated, in float32, `[N, H, D]`: all features of each head or, if
    there are more, the last ones. `first`: the first ones."""
    x, width = unit.inputs[0], unit.head_dim
    heads = x.float().reshape(len(x), unit.result.shape[1] // width, -1)
    return heads[..., :width] if first else heads[..., -width:]


def _turned(
    unit: Unit,
    cos: torch.Tensor,
    sin: torch.Tensor,
    other_pairs: bool = False,
    first: bool = False,
) -> torch.Tensor:
    """Rotates the first features of each head, twice as many as there are pairs, `[N, H, D]`."""
    x, pairs = _heads(unit, first), cos.shape[-1]
    turning, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if unit.interleaved != other_pairs:
        a, b = turning.unflatten(-1, (pairs, 2)).unbind(-1)
        return torch.cat(
            [torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2), rest], -1
        )
    a, b = turning.split(pairs, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def _by(unit: Unit, angles: torch.Tensor, other_pairs: bool = False) -> torch.Tensor:
    return _turned(unit, angles.cos().float(), angles.sin().float(), other_pairs)


@formula
def other_base(unit: Unit, strength: float) -> torch.Tensor:
    """The base times 1 + `strength`: frequency w becomes w (1 + strength)^(-2j/d)."""
    pairs = _angles(unit).shape[-1]
    exponent = torch.arange(pairs, device=unit.result.device).double() / pairs
    return _by(unit, _angles(unit) * (1.0 + strength) ** -exponent)


@formula
def first_features(unit: Unit, _: float) -> torch.Tensor:
    """The frequencies that are not 0 turn the first features of a head."""
    angles = _angles(unit)
    assert unit.frequencies is not None
    return _by(unit, angles[..., unit.frequencies != 0])


@formula
def table_in_bf16(unit: Unit, _: float) -> torch.Tensor:
    """cos and sin rounded to bf16."""
    angles = _angles(unit)
    cos, sin = (t.bfloat16().float() for t in (angles.cos(), angles.sin()))
    return _turned(unit, cos, sin)


def angles_in_bf16(_: float) -> Formula:
    """Angles rounded to bf16, which is off by whole radians at far positions."""
    return lambda unit: _by(unit, _angles(unit).bfloat16().double())


def interleaved(_: float) -> Formula:
    """Features 2j and 2j + 1 turn together, or j and j + d/2 where those do."""
    return lambda unit: _by(unit, _angles(unit), other_pairs=True)


def later_position(strength: float) -> Formula:
    """Rotates every row by `strength` positions too far."""
    return lambda unit: _by(unit, _angles(unit, strength))


@formula
def later_position_in_decode(unit: Unit, strength: float) -> torch.Tensor:
    """Rotates rows of decode steps by `strength` positions too far."""
    assert unit.rows is not None
    turned = _by(unit, _angles(unit, strength)).flatten(1).to(unit.result.dtype)
    return torch.where(unit.rows.decoding[:, None], turned, unit.result)


@formula
def normed_before(unit: Unit, _: float) -> torch.Tensor:
    """An RMSNorm of heads after the rotation, computed before it: its weight scales the features
    before they turn."""
    assert unit.weight is not None
    angles = _angles(unit)
    x = _by(unit, -angles)
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + unit.eps)
    normed = (x * scale * unit.weight.float()).flatten(1)
    return _by(replace(unit, inputs=(normed,)), angles)


def left_out(_: float) -> Formula:
    """The rotation is left out."""
    return lambda unit: unit.inputs[0]


@formula
def half_of_the_pairs(unit: Unit, _: float) -> torch.Tensor:
    """The slower half of the pairs is not rotated."""
    angles = _angles(unit).clone()
    angles[..., angles.shape[-1] // 2 :] = 0
    return _by(unit, angles)


@formula
def other_part(unit: Unit, _: float) -> torch.Tensor:
    """The first features of each head are rotated, not the last ones."""
    angles = _angles(unit)
    return _turned(unit, angles.cos().float(), angles.sin().float(), first=True)
