"""The operators of a gated delta net, in float64, and the variance of their roundings.

N = rows, L = rows of a sequence, C = channels, K = taps, H = heads of v,
D = features of a head of k, V = features of a head of v
"""

from dataclasses import dataclass

import torch

from rlk_align.probe.referee.rounding import relative_unit, rounding_variance

OPERAND_ROUNDINGS = 0.375
"""The variance of the products' operands that engines may round to the model's dtype, in squared
relative units of it, for each term of q · S: measured in chunked kernels."""
FLOAT32_ULPS = 8.0
"""The variance of a decay, in roundings to float32: the exponentials and the logarithm of engines
are within an ulp or two."""


LARGEST_EXPONENT = 80.0
"""Beyond it float32 has no e^x; a sigmoid is below 1e-34 there."""


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """The heads of a gated delta net."""

    key_heads: int
    heads: int
    key_width: int
    width: int


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    position: torch.Tensor,
    dtype: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """silu(Σ_j w_j x_{p−K+1+j} + b), with zeros before a sequence: x `[L, C]`, weight `[C, 1, K]`,
    bias `[C]`, rows at `position` `[N]` -> `[N, C]`, and its variance where the sum is rounded
    before."""
    taps = weight.shape[-1]
    padded = torch.nn.functional.pad(x, (0, 0, taps - 1, 0))
    total = sum(padded[position + j] * weight[:, 0, j] for j in range(taps))
    assert isinstance(total, torch.Tensor)
    total = total if bias is None else total + bias
    sigmoid = total.sigmoid()
    slope = sigmoid * (1 + total * (1 - sigmoid))
    return total * sigmoid, slope.square() * rounding_variance(total, dtype)


def decay(
    a: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """g = −exp(A) softplus(a + dt_bias), the logarithm of a head's decay: `[N, H]`, `[H]`, `[H]` ->
    `[N, H]` (Yang et al. 2024), and its variance by float32 roundings."""
    total, rate = a + dt_bias, a_log.exp()
    out = -rate * torch.nn.functional.softplus(total)
    slope = rate * total.sigmoid()
    return out, slope.square() * rounding_variance(total, "float32") + (
        FLOAT32_ULPS * rounding_variance(out, "float32")
    )


def sigmoid(x: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """1 / (1 + e^−x), and its variance where the exponential and the sum are rounded: vLLM on a CPU
    rounds each step in what remains of a row of heads after 32 at once."""
    out, power = x.sigmoid(), (-x).clamp(max=LARGEST_EXPONENT).exp()
    rounded = rounding_variance(power, dtype) + rounding_variance(1 + power, dtype)
    return out, out**4 * rounded


def delta_rule(
    x: torch.Tensor,
    b: torch.Tensor,
    g: torch.Tensor,
    position: torch.Tensor,
    of: DeltaShape,
    eps: float,
    dtype: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule of one sequence, token by token (Yang et al. 2024):

    S ← e^g S, u = σ(b) (v − kᵀ S), S ← S + k uᵀ, o = qᵀ S / √D,

    with q and k divided by √(|·|² + eps), each for several heads of v. x: q, k and v side by side,
    `[L, C]`; b and g: `[L, H]`; rows at `position`, ascending `[N]` -> `[N, H·V]`, and their
    variance: an engine may round what it multiplies, which remains where the terms of q · S cancel.
    """
    keys = of.key_heads * of.key_width
    q, k, v = x.split([keys, keys, of.heads * of.width], dim=1)
    q, k = (_normed(y, of, eps) for y in (q, k))
    q, v = q * of.key_width**-0.5, v.reshape(len(v), of.heads, of.width)
    beta, kept = b.sigmoid(), g.exp()
    state = x.new_zeros(of.heads, of.key_width, of.width)
    rows = {p: n for n, p in enumerate(position.tolist())}
    out, terms = (x.new_empty(len(rows), of.heads, of.width) for _ in range(2))
    for t in range(max(rows) + 1):
        state = state * kept[t, :, None, None]
        u = beta[t, :, None] * (v[t] - torch.einsum("hd,hdv->hv", k[t], state))
        state = state + k[t][:, :, None] * u[:, None]
        if t in rows:
            each = q[t][:, :, None] * state
            out[rows[t]], terms[rows[t]] = each.sum(dim=1), each.square().sum(dim=1)
    variance = OPERAND_ROUNDINGS * relative_unit(dtype) ** 2 * terms
    return out.flatten(1), variance.flatten(1)


def _normed(x: torch.Tensor, of: DeltaShape, eps: float) -> torch.Tensor:
    """Heads of q or k `[L, ...]`, each of norm 1 and repeated for its heads of v: `[L, H, D]`."""
    heads = x.reshape(len(x), of.key_heads, of.key_width)
    heads = heads * torch.rsqrt(heads.square().sum(dim=-1, keepdim=True) + eps)
    return heads.repeat_interleave(of.heads // of.key_heads, dim=1)


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, dtype: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """x / √(mean(x²) + eps) · weight · silu(gate), over heads as wide as the weight: `[N, F]`, and
    its variance where the norm is rounded, and again after the weight."""
    heads = x.reshape(len(x), -1, len(weight))
    normed = heads * torch.rsqrt(heads.square().mean(dim=-1, keepdim=True) + eps)
    before = rounding_variance(normed, dtype) * weight.square()
    before = (before + rounding_variance(normed * weight, dtype)).reshape_as(x)
    factor = torch.nn.functional.silu(gate)
    return (normed * weight).reshape_as(x) * factor, before * factor.square()


def output_gate(
    x: torch.Tensor, gated: torch.Tensor, heads: int, dtype: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """x σ(gate), where `gated` `[N, 2 F]` has each head of q before its gate: `[N, F]`, and its
    variance where the sigmoid is rounded."""
    gate = halves(gated, heads)[1].sigmoid()
    return x * gate, x.square() * rounding_variance(gate, dtype)


def halves(gated: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The queries and the gates in `[N, 2 F]`, `[N, F]` each."""
    both = gated.reshape(len(gated), heads, 2, -1)
    return both[:, :, 0].flatten(1), both[:, :, 1].flatten(1)
