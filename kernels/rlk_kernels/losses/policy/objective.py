"""The clipped objectives of a policy: the loss of a token, its derivative with respect to the
log-prob, and the weights of the tokens. All are in float64 and elementwise, except for sums over a
sequence, whose order depends on the sequence alone.

With r = exp(logp - old_logp) of a token, A its advantage, (low, high) = clip:
    grpo, dr_grpo, dapo, ppo    -min(r A, clamp(r, 1 - low, 1 + high) A)
    gspo                        the same with r = exp(mean of logp - old_logp over the sequence)
    cispo                       -clamp(r, 1 - low, 1 + high) A logp, the factor without a gradient
times c, a correction for the rollout by rho = exp(old_logp - rollout_logp), without a gradient:
    token_truncate              clamp(rho, *limits)                 truncated importance sampling
    token_mask                  rho, and 0 outside of the limits    masked importance sampling
    sequence_truncate, _mask    the same with rho the product over the sequence
plus beta KL(policy, reference), with d = ref_logp - logp:
    k1    -d            k2    d^2 / 2          k3    exp(d) - 1 - d
The loss is sum_t w[t] loss[t], with w[t] = 0 where the mask is 0, else
    grpo, gspo          1 / (tokens of its sequence x sequences)      mean of the sequences' means
    dr_grpo             1 / (max_tokens x sequences)                  a constant
    dapo, ppo, cispo    1 / tokens of the batch                       mean of the tokens
The derivative of -min(r A, clamp(r) A) is -r A, and 0 where the clip is active: r A > clamp(r) A.

T = tokens   B = sequences
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlk_kernels.errors import UnsupportedDtype
from rlk_kernels.numerics.rows import tree_sum

AVERAGES = {
    "grpo": "grpo", "dr_grpo": "dr_grpo", "dapo": "dapo", "ppo": "dapo", "gspo": "grpo",
    "cispo": "dapo",
}  # fmt: skip
"""Loss type -> the type whose weights it uses (`token_weights`)."""
CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
KL = ("k1", "k2", "k3")
NUMBERS = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip
"""Dtypes of the inputs with one number for each token."""
METRICS = (
    "tokens", "clip_fraction", "clip_low_fraction", "clip_high_fraction", "k1", "k3", "ratio_mean",
    "logp_mean", "ratio_min", "ratio_max", "ref_k3",
)  # fmt: skip
"""The scalars of `reduce_loss`, in this order; the last one only with ref_logp."""


@dataclass(frozen=True, slots=True)
class Objective:
    """The options of a token's loss; see `policy_loss`."""

    loss_type: str
    low: float
    high: float
    correction: str | None = None
    limits: tuple[float, float] = (0.0, 2.0)
    kl: str = "k3"
    beta: float = 0.0


def check_objective(
    name: str, objective: Objective, known: tuple[str, ...], max_tokens: int | None,
    rollout_logp: Tensor | None, ref_logp: Tensor | None,
) -> None:  # fmt: skip
    """Raise ValueError if the options of a call of the operator `name` are invalid; known: the loss
    types that it computes."""
    low, high, beta, correction = (
        objective.low,
        objective.high,
        objective.beta,
        objective.correction,
    )
    for what, value, choices in (
        ("loss_type", objective.loss_type, known),
        ("kl", objective.kl, KL),
        ("correction", correction, (None, *CORRECTIONS)),
    ):
        if value not in choices:
            raise ValueError(f"{name}: {what} {value!r} is unknown; choose from {tuple(choices)}")
    if correction is not None and rollout_logp is None:
        raise ValueError(f"{name}: correction needs rollout_logp")
    if beta and ref_logp is None:
        raise ValueError(f"{name}: beta needs ref_logp; without it there is no KL term")
    if objective.loss_type == "dr_grpo" and not (max_tokens and max_tokens > 0):
        raise ValueError(f"{name}: dr_grpo needs max_tokens of at least 1, not {max_tokens}")
    least, most = objective.limits
    if not (0 <= low <= 1 and high >= 0 and 0 <= least <= most and beta >= 0):
        raise ValueError(
            f"{name}: clip {(low, high)}, limits {objective.limits} and beta {beta} must not be "
            "negative, low must be at most 1, and limits must rise"
        )


def pair_of(name: str, what: str, pair: tuple[float, float]) -> tuple[float, float]:
    """(low, high) as floats; raises ValueError for anything else."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ValueError(f"{name}: {what} is (low, high), not {pair!r}")
    return float(pair[0]), float(pair[1])


def check_numbers(name: str, inputs: dict[str, Tensor]) -> None:
    """Raise UnsupportedDtype if the dtype of an input is not in NUMBERS."""
    for what, x in inputs.items():
        if x.dtype not in NUMBERS:
            raise UnsupportedDtype(f"{name}: {what} is {x.dtype}; it takes one of {NUMBERS}")


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of each token, in float64 [T]."""

    value: Tensor
    slope: Tensor
    """The derivative of `value` with respect to the token's log-prob; for gspo the token's share of
    its sequence's derivative."""
    ratio: Tensor
    active: Tensor
    """bool: whether the clip is active."""
    factor: Tensor
    """The correction for the rollout's log-probs; 1 without a correction."""
    kl: Tensor
    """The KL term before it is multiplied by beta; 0 without a reference."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """The tokens that count, and their sequences."""

    on: Tensor
    """bool [T]: whether a token is part of the sums over its sequence."""
    cu_seqlens: Tensor
    """int64 [B + 1]: the begin of each sequence, and the end of the last."""


def sequence_sums(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[B] of x[T], by halves of a power of two of elements; the added zeros change no bit."""
    if len(x) == 0:
        return x.new_zeros(len(cu_seqlens) - 1)
    longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
    width = 1 << max(longest - 1, 0).bit_length()
    at = cu_seqlens[:-1, None] + torch.arange(width, device=x.device)
    there = at < cu_seqlens[1:, None]
    rows = torch.where(there, x[at.clamp(max=len(x) - 1)], 0.0)
    return tree_sum(rows).squeeze(-1)


def token_terms(
    logp: Tensor, old: Tensor, advantages: Tensor, ref: Tensor | None, objective: Objective,
    sequences: Sequences | None = None, rollout: Tensor | None = None,
) -> Terms:  # fmt: skip
    """The terms of each token. gspo and a correction need `sequences`."""
    logp, old, a = logp.double(), old.double(), advantages.double()
    log_ratio = logp - old
    if objective.loss_type == "gspo":
        log_ratio = _mean_of_sequence(log_ratio, sequences)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - objective.low, 1.0 + objective.high)
    if objective.loss_type == "cispo":
        active = clipped != ratio
        value, slope = -clipped * a * logp, -clipped * a
    else:
        unclipped = torch.where((a == 0) & ratio.isinf(), 0.0, ratio * a)
        active = unclipped > clipped * a
        value = -torch.where(active, clipped * a, unclipped)
        slope = torch.where(active, 0.0, -unclipped)
    factor = torch.ones_like(value)
    if objective.correction is not None:
        assert rollout is not None
        factor = _correction(old - rollout.double(), sequences, objective)
        # The ratio of a sequence is part of each token's loss, so its gradient sums all factors.
        whole = objective.loss_type == "gspo"
        shared = _mean_of_sequence(factor, sequences) if whole else factor
        value, slope = _weighted(value, factor), _weighted(slope, shared)
    kl = torch.zeros_like(value)
    if ref is not None:
        d = ref.double() - logp
        kl, kl_slope = _kl(d, objective.kl)
        if objective.beta:
            value, slope = value + objective.beta * kl, slope + objective.beta * kl_slope
    return Terms(value, slope, ratio, active, factor, kl)


def _weighted(x: Tensor, factor: Tensor) -> Tensor:
    """x times factor; 0 for a factor of 0, even if x overflows."""
    return torch.where((factor == 0) & x.isinf(), 0.0, x * factor)


def _mean_of_sequence(x: Tensor, sequences: Sequences | None) -> Tensor:
    """[T]: the mean of x over the tokens of the sequence that count."""
    assert sequences is not None
    on, cu_seqlens = sequences.on, sequences.cu_seqlens
    sums = sequence_sums(torch.where(on, x, 0.0), cu_seqlens)
    counts = sequence_sums(on.double(), cu_seqlens).clamp(min=1.0)
    return (sums / counts)[sequence_of(len(x), cu_seqlens)]


def _correction(log_ratio: Tensor, sequences: Sequences | None, objective: Objective) -> Tensor:
    level, _, how = str(objective.correction).partition("_")
    if level == "sequence":
        assert sequences is not None
        on, cu_seqlens = sequences.on, sequences.cu_seqlens
        sums = sequence_sums(torch.where(on, log_ratio, 0.0), cu_seqlens)
        log_ratio = sums[sequence_of(len(on), cu_seqlens)]
    ratio, (low, high) = log_ratio.exp(), objective.limits
    if how == "truncate":
        return ratio.clamp(low, high)
    # NaN is neither inside nor outside the limits: it remains and makes the loss NaN.
    return torch.where((ratio < low) | (ratio > high), 0.0, ratio)


def _kl(d: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """(estimate, its derivative with respect to logp) of d = ref_logp - logp."""
    if kind == "k1":
        return -d, torch.ones_like(d)
    if kind == "k2":
        return 0.5 * d * d, -d
    return torch.expm1(d) - d, -torch.expm1(d)


def token_weights(
    mask: Tensor, cu_seqlens: Tensor, loss_type: str, max_tokens: int | None
) -> Tensor:
    """w[T] float64 from mask[T] (0 or 1) and the sequences' bounds cu_seqlens[B + 1]."""
    w = mask.double()
    sequences = max(cu_seqlens.shape[0] - 1, 1)
    if loss_type == "dr_grpo":
        assert max_tokens is not None
        return w / (sequences * max_tokens)
    ends = torch.cat([w.new_zeros(1), exact_cumsum(w)])
    if loss_type == "grpo":
        tokens = ends[cu_seqlens[1:]] - ends[cu_seqlens[:-1]]
        return w / (tokens.clamp(min=1.0)[sequence_of(mask.shape[0], cu_seqlens)] * sequences)
    return w / ends[-1].clamp(min=1.0)


def exact_cumsum(w: Tensor) -> Tensor:
    """The running sum of zeros and ones: whole numbers, which any order adds exactly."""
    return w.to(torch.int64).cumsum(0).double()


def sequence_of(t: int, cu_seqlens: Tensor) -> Tensor:
    """[T]: the index of each token's sequence."""
    token = torch.arange(t, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)


def batch_sums(on: Tensor, columns: list[Tensor]) -> tuple[Tensor, Tensor]:
    """(sums[2], means) over the tokens that are `on`: sums of the first two columns [T] and means
    of the others. The second column must be 1 for each token. Sums are by halves of the batch."""
    stack = torch.stack([torch.where(on, x.double(), 0.0) for x in columns])
    sums = tree_sum(stack).squeeze(-1)
    return sums[:2], sums[2:] / sums[1].clamp(min=1.0)
