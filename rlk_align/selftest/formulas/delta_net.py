"""Faulty gated delta nets: S ← e^g S, u = β (v − kᵀ S), S ← S + k uᵀ, o = qᵀ S."""

from collections.abc import Callable

import torch

from rlk_align.selftest.planting.operands import Convolution, Recurrence, State, Unit, formula

Ruled = tuple[torch.Tensor, State]
CHUNK = 64
"""The rows over which engines add up the logarithms of decays."""


@formula
def not_reset(unit: Recurrence, _: float) -> Ruled:
    """A sequence begins with the state at the end of the previous one, which had its own tokens."""
    return _beginning(unit, unit.length)


@formula
def stale(unit: Recurrence, _: float) -> Ruled:
    """A sequence begins with the state that another request left in its slot, which had the first
    half of its tokens."""
    return _beginning(unit, max(1, unit.length // 2))


def _beginning(unit: Recurrence, length: int) -> Ruled:
    """`length`: the number of tokens of the request before."""
    if unit.state is not None:
        return unit.usual()
    _, left = unit.compute(slice(0, length), None, None)
    return unit.compute(slice(0, unit.length), left, None)


@formula
def boundary_loses_a_token(unit: Recurrence, _: float) -> Ruled:
    """The second half of the tokens begins with the state before the last token of the first."""
    return _in_two_parts(unit, lambda half: unit.compute(slice(0, half - 1), unit.state, None)[1])


@formula
def padding_decays(unit: Recurrence, strength: float) -> Ruled:
    """The state decays once more for each of `strength` rows of padding after the first half."""

    def decayed(half: int) -> State:
        state = unit.compute(slice(0, half), unit.state, None)[1]
        assert unit.decay is not None
        more = unit.decay[half - 1] * strength
        return state * more.exp()[:, None, None]

    return _in_two_parts(unit, decayed)


def _in_two_parts(unit: Recurrence, between: Callable[[int], State]) -> Ruled:
    half = unit.length // 2
    if half < 2 or unit.decay is None:
        return unit.usual()
    first, _ = unit.compute(slice(0, half), unit.state, None)
    second, after = unit.compute(slice(half, unit.length), between(half), None)
    return torch.cat([first, second]), after


@formula
def decays_in_bf16(unit: Recurrence, _: float) -> Ruled:
    """exp(g) is rounded to bf16."""
    if unit.decay is None:
        return unit.usual()
    rounded = unit.decay.exp().bfloat16().float().clamp(min=1e-30).log()
    return unit.compute(slice(0, unit.length), unit.state, rounded)


@formula
def sums_in_bf16(unit: Recurrence, _: float) -> Ruled:
    """The sums of g from the beginning of each chunk are rounded to bf16."""
    if unit.decay is None:
        return unit.usual()
    sums = (chunk.cumsum(0).bfloat16().float() for chunk in unit.decay.split(CHUNK))
    rounded = [s.diff(dim=0, prepend=torch.zeros_like(s[:1])) for s in sums]
    return unit.compute(slice(0, unit.length), unit.state, torch.cat(rounded))


@formula
def state_in_bf16(unit: Recurrence, _: float) -> Ruled:
    """The state is kept in bf16 from one call to the next."""
    out, after = unit.usual()
    return out, after.bfloat16().to(after.dtype)


@formula
def restored_from_fp8(unit: Recurrence, _: float) -> Ruled:
    """A prefill that continues a sequence begins with the state rounded to fp8, scaled by head."""
    if unit.state is None or unit.length == 1:
        return unit.usual()
    fp8 = torch.float8_e4m3fn
    scale = unit.state.abs().amax((1, 2), keepdim=True).clamp(min=1e-30) / torch.finfo(fp8).max
    rounded = (unit.state / scale).to(fp8).to(unit.state.dtype) * scale
    return unit.compute(slice(0, unit.length), rounded, None)


@formula
def one_token_late(unit: Convolution, _: float) -> torch.Tensor:
    """Each row is that of the token before it."""
    late = unit.result.roll(1, 0)
    late[0] = 0
    return late


@formula
def window_of_another(unit: Convolution, _: float) -> torch.Tensor:
    """The first rows of a sequence see the last ones of the previous one, which had its tokens,
    unless these are fewer than the convolution reads."""
    taps, out = unit.weight.shape[-1], unit.result.clone()
    if len(out) < taps:
        return out
    rows = torch.cat([unit.inputs[1 - taps :], unit.inputs[: taps - 1]]).float()
    weight = unit.weight[:, 0].float()
    total = sum(rows[j : j + taps - 1] * weight[:, j] for j in range(taps))
    assert isinstance(total, torch.Tensor)
    total = total if unit.bias is None else total + unit.bias.float()
    out[: taps - 1] = torch.nn.functional.silu(total).to(out.dtype)
    return out


@formula
def gate_before_norm(unit: Unit, _: float) -> torch.Tensor:
    """x silu(gate) is normed, in place of x."""
    assert unit.weight is not None
    x, gate = (y.float() for y in unit.inputs)
    heads = (x * torch.nn.functional.silu(gate)).reshape(-1, unit.weight.numel())
    scale = torch.rsqrt(heads.square().mean(-1, keepdim=True) + unit.eps)
    return heads * scale * unit.weight.float()
