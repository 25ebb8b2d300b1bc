"""Faults that change an operator's own result, and faulty activations and residual adds."""

import torch
from torch.nn import functional

from rlk_align.selftest.formulas.rounding import through_fp8 as _through_fp8
from rlk_align.selftest.planting.operands import Formula, Unit

CHANNEL = 11


def scaled_up(strength: float) -> Formula:
    """y (1 + strength)."""
    return lambda unit: unit.result.float() * (1.0 + strength)


def scaled_down(strength: float) -> Formula:
    """y (1 - strength)."""
    return lambda unit: unit.result.float() * (1.0 - strength)


def _where(chosen: torch.Tensor, unit: Unit, strength: float) -> torch.Tensor:
    return torch.where(chosen, unit.result.float() * (1.0 + strength), unit.result.float())


def one_position(strength: float) -> Formula:
    """Rows at position 7."""

    def formula(unit: Unit) -> torch.Tensor:
        assert unit.rows is not None
        return _where((unit.rows.positions == 7)[:, None], unit, strength)

    return formula


def scaled_up_in_decode(strength: float) -> Formula:
    """Rows of decode steps."""

    def formula(unit: Unit) -> torch.Tensor:
        assert unit.rows is not None
        return _where(unit.rows.decoding[:, None], unit, strength)

    return formula


def one_token(strength: float) -> Formula:
    """Rows of one token id: the first that the engine is given."""
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
    """One channel of each head."""
    return lambda unit: _where(_channel(unit), unit, strength)


def one_channel_shifted(strength: float) -> Formula:
    """One feature plus a constant."""

    def formula(unit: Unit) -> torch.Tensor:
        y = unit.result.float().clone()
        y[..., CHANNEL] += strength
        return y

    return formula


def one_head_scaled(strength: float) -> Formula:
    """The features of head 1."""

    def formula(unit: Unit) -> torch.Tensor:
        heads = torch.arange(unit.result.shape[-1], device=unit.result.device) // unit.head_dim
        return _where(heads == 1, unit, strength)

    return formula


def heads_swapped(_: float) -> Formula:
    """Heads 0 and 1 in each other's place."""

    def formula(unit: Unit) -> torch.Tensor:
        d = unit.head_dim
        return torch.cat(
            [unit.result[..., d : 2 * d], unit.result[..., :d], unit.result[..., 2 * d :]], -1
        )

    return formula


def through_fp8(_: float) -> Formula:
    """Rows rounded to fp8."""
    return lambda unit: _through_fp8(unit.result)


def through_bf16(_: float) -> Formula:
    """Rounded to bf16."""
    return lambda unit: unit.result.bfloat16()


def softcap(strength: float) -> Formula:
    """c tanh(y / c), c = 1 / strength."""
    return lambda unit: torch.tanh(unit.result.float() * strength) / strength


def ulps(strength: float) -> Formula:
    """Away from zero by whole units in the last place."""

    def formula(unit: Unit) -> torch.Tensor:
        result = unit.result.contiguous()
        bits = result.view({2: torch.int16, 4: torch.int32}[result.element_size()])
        # The bits of a float, its sign aside, count upwards with its magnitude.
        return (bits + round(strength)).view(result.dtype)

    return formula


def noise(strength: float) -> Formula:
    """Each element times 1 + strength n, n normal and seeded for each forward."""

    def formula(unit: Unit) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        n = torch.randn(unit.result.shape, generator=generator).to(unit.result.device)
        return unit.result.float() * (1.0 + strength * n)

    return formula


def gelu_for_silu(_: float) -> Formula:
    """gelu(gate) up."""
    return lambda unit: (
        functional.gelu(unit.inputs[0].float(), approximate="tanh") * unit.inputs[1].float()
    )


def gate_up_swapped(_: float) -> Formula:
    """gate silu(up)."""
    return lambda unit: unit.inputs[0].float() * functional.silu(unit.inputs[1].float())


def clamped(strength: float) -> Formula:
    """Both inputs no larger than 1 / strength."""

    def formula(unit: Unit) -> torch.Tensor:
        gate, up = (x.float().clamp(-1 / strength, 1 / strength) for x in unit.inputs)
        return functional.silu(gate) * up

    return formula


def other_beta(strength: float) -> Formula:
    """gate sigmoid((1 + strength) gate) up."""

    def formula(unit: Unit) -> torch.Tensor:
        gate, up = (x.float() for x in unit.inputs)
        return gate * torch.sigmoid((1.0 + strength) * gate) * up

    return formula


def stream_twice(_: float) -> Formula:
    """2 stream + branch."""
    return lambda unit: 2.0 * unit.inputs[0].float() + unit.inputs[1].float()


def stream_left_out(_: float) -> Formula:
    """branch."""
    return lambda unit: unit.inputs[1]


def branch_scaled(strength: float) -> Formula:
    """stream + (1 + strength) branch."""
    return lambda unit: unit.inputs[0].float() + (1.0 + strength) * unit.inputs[1].float()
