"""The terms of a token's loss and its derivative with respect to the log-prob, in float64:
elementwise, except for sums over a sequence, whose order depends on the sequence alone.

T = tokens   B = sequences
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlk_kernels.losses.grpo.portable import sequence_of
from rlk_kernels.numerics.rows import tree_sum

AVERAGES = {
    "grpo": "grpo", "dr_grpo": "dr_grpo", "dapo": "dapo", "ppo": "ppo", "gspo": "grpo",
    "cispo": "dapo",
}  # fmt: skip
"""Loss type -> the type of `losses/grpo` whose weights it uses."""
CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
KL = ("k1", "k2", "k3")


@dataclass(frozen=True, slots=True)
class Objective:
    """See `policy_loss`."""

    loss_type: str
    low: float
    high: float
    correction: str | None
    limits: tuple[float, float]
    kl: str
    beta: float


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of each token, float64 [T]."""

    value: Tensor
    slope: Tensor
    """Derivative of `value` with respect to the token's log-prob, or its share of a sequence's."""
    ratio: Tensor
    active: Tensor
    """bool: whether the clip is active."""
    factor: Tensor
    """The factor that corrects for the rollout's log-probs; 1 without a correction."""
    kl: Tensor
    """KL before beta; 0 without a reference."""


def sequence_sums(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[B] of x[T]: by halves of a power of two, filled up with zeros, which change no bit of it."""
    if len(x) == 0:
        return x.new_zeros(len(cu_seqlens) - 1)
    longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
    width = 1 << max(longest - 1, 0).bit_length()
    at = cu_seqlens[:-1, None] + torch.arange(width, device=x.device)
    there = at < cu_seqlens[1:, None]
    rows = torch.where(there, x[at.clamp(max=len(x) - 1)], 0.0)
    return tree_sum(rows).squeeze(-1)


def token_terms(
    logp: Tensor, old: Tensor, advantages: Tensor, on: Tensor, cu_seqlens: Tensor,
    rollout: Tensor | None, ref: Tensor | None, objective: Objective,
) -> Terms:  # fmt: skip
    """Each token's terms; tokens that are not `on` (bool [T]) enter no sum over a sequence."""
    logp, old, a = logp.double(), old.double(), advantages.double()
    log_ratio = logp - old
    if objective.loss_type == "gspo":
        log_ratio = _mean_of_sequence(log_ratio, on, cu_seqlens)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - objective.low, 1.0 + objective.high)
    if objective.loss_type == "cispo":
        active = clipped != ratio
        value, slope = -clipped * a * logp, -clipped * a
    else:
        free = torch.where((a == 0) & ratio.isinf(), 0.0, ratio * a)
        held = clipped * a
        active = free > held
        value = -torch.where(active, held, free)
        slope = torch.where(active, 0.0, -free)
    factor = torch.ones_like(value)
    if objective.correction is not None:
        assert rollout is not None
        factor = _correction(old - rollout.double(), on, cu_seqlens, objective)
        # A sequence's ratio is part of each token's loss: its gradient sums all their factors.
        whole = objective.loss_type == "gspo"
        shared = _mean_of_sequence(factor, on, cu_seqlens) if whole else factor
        value, slope = _weighted(value, factor), _weighted(slope, shared)
    kl = torch.zeros_like(value)
    if ref is not None:
        d = ref.double() - logp
        kl, kl_slope = _kl(d, objective.kl)
        if objective.beta:
            value, slope = value + objective.beta * kl, slope + objective.beta * kl_slope
    return Terms(value, slope, ratio, active, factor, kl)


def _weighted(x: Tensor, factor: Tensor) -> Tensor:
    """x times factor; 0 for a factor of 0, also of an x that overflows."""
    return torch.where((factor == 0) & x.isinf(), 0.0, x * factor)


def _mean_of_sequence(x: Tensor, on: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T]: the mean over the tokens of its sequence that count."""
    sums = sequence_sums(torch.where(on, x, 0.0), cu_seqlens)
    counts = sequence_sums(on.double(), cu_seqlens).clamp(min=1.0)
    return (sums / counts)[sequence_of(len(x), cu_seqlens)]


def _correction(log_ratio: Tensor, on: Tensor, cu_seqlens: Tensor, objective: Objective) -> Tensor:
    level, _, how = str(objective.correction).partition("_")
    if level == "sequence":
        sums = sequence_sums(torch.where(on, log_ratio, 0.0), cu_seqlens)
        log_ratio = sums[sequence_of(len(on), cu_seqlens)]
    ratio, (low, high) = log_ratio.exp(), objective.limits
    if how == "truncate":
        return ratio.clamp(low, high)
    # NaN is neither inside nor outside the limits: it stays, and shows in the loss.
    return torch.where((ratio < low) | (ratio > high), 0.0, ratio)


def _kl(d: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """(estimate, its derivative in logp) of d = ref_logp - logp."""
    if kind == "k1":
        return -d, torch.ones_like(d)
    if kind == "k2":
        return 0.5 * d * d, -d
    return torch.expm1(d) - d, -torch.expm1(d)
