"""The operators of a state-space model (Mamba-2), in float64, and the variance of their roundings.

N = rows, L = rows of a sequence, H = heads of x, V = features of a head of x, G = groups of B and
C, D = features of a group
"""

import torch

from rlk_align.probe.referee.delta_net import FLOAT32_ULPS, DeltaShape
from rlk_align.probe.referee.rounding import relative_unit, rounding_variance

STATE_ROUNDINGS = 1.0
"""The variance of each term of C · S that is rounded to the model's dtype before the sum, in
squared relative units of it: transformers rounds the state, and what a token adds to it."""
STEP_ROUNDINGS = 2.0
"""The variance of a step dt, which transformers rounds to the model's dtype before the softplus and
after it."""


def time_step(x: torch.Tensor, bias: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """dt = softplus(x + bias): `[N, H]`, `[H]` -> `[N, H]`, and its variance where the sum is
    rounded before."""
    total = x + bias
    out = torch.nn.functional.softplus(total)
    return out, total.sigmoid().square() * rounding_variance(total, dtype)


def step_decay(dt: torch.Tensor, a_log: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """−exp(A) dt, the logarithm of a head's decay: `[N, H]`, `[H]` -> `[N, H]` (Dao and Gu 2024),
    and its variance by roundings of the exponential to float32."""
    out = -a_log.exp() * dt
    return out, FLOAT32_ULPS * rounding_variance(out, "float32")


def scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    log_decay: torch.Tensor,
    skip: torch.Tensor,
    position: torch.Tensor,
    of: DeltaShape,
    dtype: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state-space scan of one sequence, token by token (Dao and Gu 2024):

    S ← e^(A dt) S + dt x Bᵀ, y = S C + skip · x,

    with B and C of a group for several heads. x: x, B and C side by side, `[L, C]`; dt and
    log_decay: `[L, H]`; skip: `[H]`; rows at `position`, ascending `[N]` -> `[N, H·V]`, and their
    variance: engines round steps, the state and what is added to it, which remains where the terms
    of S · C cancel.
    """
    keys = of.key_heads * of.key_width
    values, b, c = x.split([of.heads * of.width, keys, keys], dim=1)
    values = values.reshape(len(values), of.heads, of.width)
    b, c = (
        y.reshape(len(y), of.key_heads, -1).repeat_interleave(of.heads // of.key_heads, dim=1)
        for y in (b, c)
    )
    state = x.new_zeros(of.heads, of.width, of.key_width)
    rows = {p: n for n, p in enumerate(position.tolist())}
    out, terms = (x.new_empty(len(rows), of.heads, of.width) for _ in range(2))
    kept = log_decay.exp()
    for t in range(max(rows) + 1):
        added = (dt[t, :, None] * values[t])[:, :, None] * b[t][:, None]
        state = state * kept[t, :, None, None] + added
        if t in rows:
            each = state * c[t][:, None]
            out[rows[t]], terms[rows[t]] = each.sum(dim=-1), each.square().sum(dim=-1)
    skipped = skip[:, None] * values[position]
    variance = STATE_ROUNDINGS * (terms + out.square() + skipped.square())
    variance += STEP_ROUNDINGS * _of_steps(values, b, c, dt, log_decay, position)
    variance *= relative_unit(dtype) ** 2
    return (out + skipped).flatten(1), variance.flatten(1)


def _of_steps(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    dt: torch.Tensor,
    log_decay: torch.Tensor,
    position: torch.Tensor,
) -> torch.Tensor:
    """Σ_r (∂y_t / ∂ ln dt_r)² of rows at `position`: `[N, H, V]`. A step changes what its token
    adds, and how all that came before decays."""
    total = log_decay.cumsum(dim=0)
    tokens = torch.arange(len(x), device=x.device)
    rows = []
    for t in position.tolist():
        seen = tokens <= t
        # [H, L]: the weight of what token s adds.
        weight = torch.einsum("hd,lhd->hl", c[t], b) * dt.T * (total[t] - total).exp().T
        added = weight[..., None] * x.transpose(0, 1)
        added = torch.where(seen[None, :, None], added, 0.0)
        before = added.cumsum(dim=1) - added
        slope = added + (log_decay.T)[..., None] * before
        rows.append(torch.where(seen[None, :, None], slope, 0.0).square().sum(dim=1))
    return torch.stack(rows)


def gated_then_normed(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    groups: int,
    eps: float,
    dtype: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y / √(mean(y²) + eps) · weight of y = x · silu(gate), over each group of features: `[N, F]`,
    and its variance where the norm is rounded before the weight."""
    y = (x * torch.nn.functional.silu(gate)).unflatten(1, (groups, -1))
    normed = (y * torch.rsqrt(y.square().mean(dim=-1, keepdim=True) + eps)).flatten(1)
    return normed * weight, rounding_variance(normed, dtype) * weight.square()


def silu_gate(x: torch.Tensor, gate: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x · silu(gate): `[N, F]`, and its variance where silu(gate) is rounded before."""
    silu = torch.nn.functional.silu(gate)
    return x * silu, x.square() * rounding_variance(silu, dtype)
