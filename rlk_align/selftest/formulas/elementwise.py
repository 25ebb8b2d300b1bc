"""Faults that change an operator's own result, and faulty activations and residual adds."""

import torch
from torch.nn import functional

from rlk_align.selftest.formulas.rounding import through_fp8 as _through_fp8
from rlk_align.selftest.planting.operands import Formula, Unit, formula

CHANNEL = 11


def scaled_up(strength: float) -> Formula:
    """y (1 + strength)."""
    return lambda unit: unit.result.float() * (1.0 + strength)


def scaled_down(strength: float) -> Formula:
    """y (1 - strength)."""
    return lambda unit: unit.result.float() * (1.0 - strength)


def _where(chosen: torch.Tensor, unit: Unit, strength: float) -> torch.Tensor:
    return torch.where(chosen, unit.result.float() * (1.0 + strength), unit.result.float())


@formula
def one_position(unit: Unit, strength: float) -> torch.Tensor:
    """Scales rows at position 7."""
    assert unit.rows is not None
    return _where((unit.rows.positions == 7)[:, None], unit, strength)


@formula
def scaled_up_in_decode(unit: Unit, strength: float) -> torch.Tensor:
    """Scales rows of decode steps."""
    assert unit.rows is not None
    return _where(unit.rows.decoding[:, None], unit, strength)


def one_token(strength: float) -> Formula:
    """Scales the rows of one token id, which is the first that the engine gets."""
    chosen: list[torch.Tensor] = []

    def formula(unit: Unit) -> torch.Tensor:
        assert unit.rows is not None
        if not chosen:
            chosen.append(unit.rows.ids[0].clone())
        return _where((unit.rows.ids == chosen[0])[:, None], unit, strength)

    return formula


def _channel(unit: Unit) -> torch.Tensor:
    """bool `[F]`: the same channel of every head."""
    return torch.arange(unit.result.shape[-1], device=unit.result.device) % unit.head_dim == CHANNEL


def one_channel_scaled(strength: float) -> Formula:
    """Scales one channel of each head."""
    return lambda unit: _where(_channel(unit), unit, strength)


@formula
def one_channel_shifted(unit: Unit, strength: float) -> torch.Tensor:
    """Adds a constant to one feature."""
    y = unit.result.float().clone()
    y[..., CHANNEL] += strength
    return y


@formula
def one_head_scaled(unit: Unit, strength: float) -> torch.Tensor:
    """Scales the features of head 1."""
    heads = torch.arange(unit.result.shape[-1], device=unit.result.device) // unit.head_dim
    return _where(heads == 1, unit, strength)


@formula
def heads_swapped(unit: Unit, _: float) -> torch.Tensor:
    """Swaps heads 0 and 1."""
    d = unit.head_dim
    return torch.cat(
        [unit.result[..., d : 2 * d], unit.result[..., :d], unit.result[..., 2 * d :]], -1
    )


def through_fp8(_: float) -> Formula:
    """Rows rounded to fp8."""
    return lambda unit: _through_fp8(unit.result)


def through_bf16(_: float) -> Formula:
    """Rounded to bf16."""
    return lambda unit: unit.result.bfloat16()


def softcap(strength: float) -> Formula:
    """c tanh(y / c), c = 1 / strength."""
    return lambda unit: torch.tanh(unit.result.float() * strength) / strength


@formula
def ulps(unit: Unit, strength: float) -> torch.Tensor:
    """Moves elements away from zero by whole units in the last place."""
    result = unit.result.contiguous()
    bits = result.view({2: torch.int16, 4: torch.int32}[result.element_size()])
    # Without the sign, the bits of a float grow by 1 from each value to the next larger one.
    return (bits + round(strength)).view(result.dtype)


@formula
def noise(unit: Unit, strength: float) -> torch.Tensor:
    """Each element times 1 + strength n, n normal and seeded for each forward."""
    generator = torch.Generator().manual_seed(0)
    n = torch.randn(unit.result.shape, generator=generator).to(unit.result.device)
    return unit.result.float() * (1.0 + strength * n)


def gelu_for_silu(_: float) -> Formula:
    """gelu(gate) up."""
    return lambda unit: (
        functional.gelu(unit.inputs[0].float(), approximate="tanh") * unit.inputs[1].float()
    )


def exact_gelu(_: float) -> Formula:
    """gelu(up)."""
    return lambda unit: functional.gelu(unit.inputs[0].float())


def gate_up_swapped(_: float) -> Formula:
    """gate silu(up)."""
    return lambda unit: unit.inputs[0].float() * functional.silu(unit.inputs[1].float())


@formula
def clamped(unit: Unit, strength: float) -> torch.Tensor:
    """Clamps both inputs to 1 / strength."""
    gate, up = (x.float().clamp(-1 / strength, 1 / strength) for x in unit.inputs)
    return functional.silu(gate) * up


@formula
def other_beta(unit: Unit, strength: float) -> torch.Tensor:
    """gate sigmoid((1 + strength) gate) up."""
    gate, up = (x.float() for x in unit.inputs)
    return gate * torch.sigmoid((1.0 + strength) * gate) * up


def _branch(unit: Unit) -> torch.Tensor:
    """What a residual add adds to the stream: the sum of its branches, multiplied."""
    branch, *more = (x.float() for x in unit.inputs[1:])
    return unit.multiplier * sum(more, branch)


def stream_twice(_: float) -> Formula:
    """2 stream + branch."""
    return lambda unit: 2.0 * unit.inputs[0].float() + _branch(unit)


def stream_left_out(_: float) -> Formula:
    """branch."""
    return _branch


def branch_scaled(strength: float) -> Formula:
    """stream + (1 + strength) branch."""
    return lambda unit: unit.inputs[0].float() + (1.0 + strength) * _branch(unit)


def second_branch_left_out(_: float) -> Formula:
    """stream + the first of two branches, multiplied."""
    return lambda unit: unit.inputs[0].float() + unit.multiplier * unit.inputs[1].float()


def input_not_multiplied(_: float) -> Formula:
    """y of an operator that is linear in its input, which the config's number does not multiply."""
    return lambda unit: unit.result.float() / unit.input_multiplier


def multiplier_left_out(_: float) -> Formula:
    """stream + branch, or the output before it is multiplied."""
    return lambda unit: (
        sum((x.float() for x in unit.inputs[1:]), unit.inputs[0].float())
        if len(unit.inputs) > 1
        else unit.result.float() / unit.multiplier
    )
