"""The operators of a decoder transformer, in float64.

Each takes rows of float64 and gives what an engine without rounding would: legends as
N = rows, F = features, H = heads, D = head width, L = keys of a sequence.
"""

import math
from collections.abc import Callable

import torch

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_pytorch_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
}
"""Activations by the config's `hidden_act`."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over groups as wide as the weight: `[N, F]` -> `[N, F]`
    (Zhang and Sennrich 2019)."""
    groups = x.reshape(len(x), -1, len(weight))
    scale = torch.rsqrt(groups.square().mean(dim=-1, keepdim=True) + eps)
    return (groups * scale * weight).reshape_as(x)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x · weightᵀ + bias: `[N, K]`, `[F, K]`, `[F]` -> `[N, F]`."""
    out = x @ weight.T
    return out if bias is None else out + bias


def rotate(
    x: torch.Tensor, angle: torch.Tensor, heads: int, scaling: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rotary embedding in its half-split form (Su et al. 2021, as Llama has it): the pair
    (x_j, x_{j+R}) of each head turned by `angle[:, j]`, `[N, R]`, times `scaling`; features beyond
    2R stay. `[N, F]` -> `[N, F]`, and its derivative by the angle."""
    width = angle.shape[1]
    h = x.reshape(len(x), heads, -1)
    low, high, rest = h[..., :width], h[..., width : 2 * width], h[..., 2 * width :]
    cos, sin = angle.cos()[:, None] * scaling, angle.sin()[:, None] * scaling
    out = torch.cat([low * cos - high * sin, high * cos + low * sin, rest], dim=-1)
    slope = torch.cat([-low * sin - high * cos, low * cos - high * sin, 0 * rest], dim=-1)
    return out.reshape_as(x), slope.reshape_as(x)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position: torch.Tensor,
    heads: tuple[int, int],
    window: int | None = None,
) -> torch.Tensor:
    """softmax(q · kᵀ / √D) · v over the keys at positions p − window < j ≤ p of one sequence.

    q: `[N, H·D]` at `position` `[N]`; k, v: `[L, Hkv·D]` of positions 0 … L − 1; `heads`: H, Hkv.
    """
    count, groups = heads
    query = q.reshape(len(q), groups, count // groups, -1)
    key, value = (x.reshape(len(x), groups, -1) for x in (k, v))
    scores = torch.einsum("nghd,lgd->nghl", query, key) / math.sqrt(query.shape[-1])
    at = torch.arange(len(k), device=k.device)
    visible = at <= position[:, None]
    if window is not None:
        visible &= at > position[:, None] - window
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    return torch.einsum("nghl,lgd->nghd", scores.softmax(dim=-1), value).reshape(len(q), -1)


def log_prob(logits: torch.Tensor, target: torch.Tensor, temperature: float) -> torch.Tensor:
    """log softmax(logits / temperature)[target]: `[N, V]`, `[N]` -> `[N, 1]`, in nats."""
    scaled = logits / temperature
    return scaled.gather(1, target[:, None]) - scaled.logsumexp(dim=1, keepdim=True)
