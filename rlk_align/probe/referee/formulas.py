"""The operators of a decoder transformer, in float64.

Each takes float64 rows and returns the output of an engine without rounding.
N = rows, F = features, H = heads, D = head width, L = keys of a sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_pytorch_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
}
"""Activations by the config's `hidden_act`."""


FLOAT32_SUM = (2 * 2.0**-24) ** 2 / 12
"""The variance of rounding a partial sum near 1 in float32."""


@dataclass(frozen=True, slots=True)
class AttentionRoundings:
    """The relative variances of the roundings that an engine may make within attention."""

    score: float
    """The variance of q · k, before and after it is scaled."""
    exponent: float
    """The variance of a score minus the largest one."""
    probability: float
    float32_sums: bool
    """Whether the rounding of sums in float32 counts."""
    query: float = 0.0
    """The variance of q, where an engine multiplies it by a factor before the product."""


class Attended(NamedTuple):
    """The output of attention, float64."""

    out: torch.Tensor
    """`[N, H·D]`."""
    variance: torch.Tensor
    """The variance of each output by roundings within attention, `[N, H·D]`."""
    shared: torch.Tensor
    """The variance of Σ error · output over a head, whose features share these errors, `[N, H]`."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over groups as wide as the weight: `[N, F]` -> `[N, F]`
    (Zhang and Sennrich 2019)."""
    groups = x.reshape(len(x), -1, len(weight))
    scale = torch.rsqrt(groups.square().mean(dim=-1, keepdim=True) + eps)
    return (groups * scale * weight).reshape_as(x)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x - mean(x)) / sqrt(var(x) + eps) · weight + bias: `[N, F]` -> `[N, F]` (Ba, Kiros and
    Hinton 2016), and x / sqrt(var(x) + eps), from which engines subtract the scaled mean."""
    centred = x - x.mean(dim=-1, keepdim=True)
    inverse = torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)
    out = centred * inverse * weight
    return out if bias is None else out + bias, x * inverse


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x · weightᵀ + bias: `[N, K]`, `[F, K]`, `[F]` -> `[N, F]`."""
    out = x @ weight.T
    return out if bias is None else out + bias


def sum_rounding(x: torch.Tensor, weight: torch.Tensor, dtype: str) -> torch.Tensor:
    """The variance of x · weightᵀ if its K products are added up in float32, where each of K
    partial sums is rounded: `[N, K]`, `[F, K]` -> `[N, F]`.

    A large term is part of all partial sums that follow it: K Σ (x w)². If outputs are rounded to
    fewer bits than float32 has, |x|² |w|² is close enough; for terms of one size it is the same.
    """
    x2, w2 = x.square(), weight.square()
    if dtype == "float32":
        return FLOAT32_SUM * x.shape[1] * (x2.float() @ w2.float().T).double()
    return FLOAT32_SUM * x2.sum(dim=1)[:, None] * w2.sum(dim=1)


def rotate(
    x: torch.Tensor,
    angle: torch.Tensor,
    heads: int,
    scaling: float = 1.0,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rotary embedding in its half-split form (Su et al. 2021, as Llama has it): the pair
    (x_j, x_{j+R}) of each head turned by `angle[:, j]`, `[N, R]`, times `scaling`; features beyond
    2R stay. `interleaved`: the pairs are (x_2j, x_{2j+1}) (GLM). `[N, F]` -> `[N, F]`, and its
    derivative by the angle."""
    width = angle.shape[1]
    h = x.reshape(len(x), heads, -1)
    low, high, rest = h[..., :width], h[..., width : 2 * width], h[..., 2 * width :]
    if interleaved:
        low, high = h[..., 0 : 2 * width : 2], h[..., 1 : 2 * width : 2]
    cos, sin = angle.cos()[:, None] * scaling, angle.sin()[:, None] * scaling
    turned = low * cos - high * sin, high * cos + low * sin
    slopes = -low * sin - high * cos, low * cos - high * sin
    if interleaved:
        pairs = (torch.stack(pair, dim=-1).flatten(-2) for pair in (turned, slopes))
    else:
        pairs = (torch.cat(pair, dim=-1) for pair in (turned, slopes))
    out, slope = (torch.cat(both, dim=-1) for both in zip(pairs, (rest, 0 * rest), strict=True))
    return out.reshape_as(x), slope.reshape_as(x)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position: torch.Tensor,
    heads: tuple[int, int],
    window: int | None,
    roundings: AttentionRoundings,
    scale: torch.Tensor | None = None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> Attended:
    """softmax(scale q · kᵀ) · v over the keys at positions p − window < j ≤ p of one sequence, and
    its variance by rounding.

    q: `[N, H·D]` at `position` `[N]`; k, v: `[L, Hkv·D]` of positions 0 … L − 1; `heads`: H, Hkv;
    `scale`: that of each row, `[N]`; 1 / √D if it is None. `cap`: a score s becomes
    cap tanh(s / cap) (Gemma 2). `sinks`: the score of each head for one more key, which every query
    sees and whose value is 0, `[H]` (GPT-OSS). An error δ of a score changes the output by
    p δ (v − output), and a relative error δ of a probability by p δ v.
    """
    count, groups = heads
    query = q.reshape(len(q), groups, count // groups, -1)
    key, value = (x.reshape(len(x), groups, -1) for x in (k, v))
    if sinks is not None:
        key, value = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 1)) for x in (key, value))
    width = query.shape[-1]
    row_scale = q.new_full((len(q),), width**-0.5) if scale is None else scale
    row_scale = row_scale[:, None, None, None]
    scores = torch.einsum("nghd,lgd->nghl", query, key) * row_scale
    scores = scores if cap is None else soft_cap(scores, cap)
    score_variance = roundings.score * scores.square()
    at = torch.arange(len(k), device=k.device)
    visible = at <= position[:, None]
    if window is not None:
        visible &= at > position[:, None] - window
    if sinks is not None:
        scores[..., -1] = sinks.reshape(groups, -1)
        visible = torch.nn.functional.pad(visible, (0, 1), value=True)
    hidden = ~visible[:, None, None]
    masked = scores.masked_fill(hidden, -torch.inf)
    p = masked.softmax(dim=-1)
    out = torch.einsum("nghl,lgd->nghd", p, value)
    # The variance of each score is that of its product and that of its distance to the largest one.
    score_variance += roundings.exponent * (scores - masked.amax(dim=-1, keepdim=True)).square()
    if roundings.float32_sums or roundings.query:
        terms = torch.einsum("nghd,lgd->nghl", query.square(), key.square())
        of_sum = roundings.float32_sums * FLOAT32_SUM * width
        score_variance += (of_sum + roundings.query) * row_scale.square() * terms
    score_variance = (p.square() * score_variance).masked_fill(hidden, 0.0)
    share = p.square() * (roundings.probability + roundings.float32_sums * len(k) * FLOAT32_SUM)
    of_value = torch.einsum("nghl,lgd->nghd", score_variance, value)
    of_square = torch.einsum("nghl,lgd->nghd", score_variance + share, value.square())
    variance = (
        of_square - 2 * out * of_value + out.square() * score_variance.sum(dim=-1, keepdim=True)
    )
    along = torch.einsum("nghd,lgd->nghl", out, value)
    power = out.square().sum(dim=-1, keepdim=True)
    shared = (score_variance * (along - power).square() + share * along.square()).sum(dim=-1)
    variance = variance.clamp(min=0).reshape(len(q), -1)
    return Attended(out.reshape(len(q), -1), variance, shared.reshape(len(q), -1))


@dataclass(frozen=True, slots=True)
class Activated:
    """The output of an activation of gate and up, float64, and its derivatives."""

    out: torch.Tensor
    by_gate: torch.Tensor
    by_up: torch.Tensor
    steps: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    """The intermediate values that an engine may round, and the derivative by each of them."""


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> Activated:
    """gate · σ(gate) · up (Shazeer 2020), of any shape."""
    sigmoid = gate.sigmoid()
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    return Activated(gate * sigmoid * up, slope * up, gate * sigmoid)


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float) -> Activated:
    """gate · σ(α gate) · (up + 1), of gate ≤ limit and |up| ≤ limit (GPT-OSS), of any shape."""
    g, u = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
    sigmoid = (alpha * g).sigmoid()
    slope = sigmoid * (1 - sigmoid)
    return Activated(
        out=g * sigmoid * u,
        by_gate=(sigmoid + alpha * g * slope) * u * (gate <= limit),
        by_up=g * sigmoid * (up.abs() <= limit),
        steps=((alpha * g, g * slope * u), (sigmoid, g * u), (g * sigmoid, u), (u, g * sigmoid)),
    )


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap tanh(x / cap), of any shape."""
    return cap * torch.tanh(x / cap)


def log_prob(logits: torch.Tensor, target: torch.Tensor, temperature: float) -> torch.Tensor:
    """log softmax(logits / temperature)[target]: `[N, V]`, `[N]` -> `[N, 1]`, in nats."""
    scaled = logits / temperature
    return scaled.gather(1, target[:, None]) - scaled.logsumexp(dim=1, keepdim=True)
