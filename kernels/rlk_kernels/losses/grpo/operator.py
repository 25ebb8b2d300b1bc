"""The loss of GRPO, Dr. GRPO, DAPO and PPO from log-probabilities: terms, reductions, metrics.

With r = exp(logp - old_logp), A the advantage, (low, high) = clip and d = ref_logp - logp:
    loss[t] = -min(r A, clamp(r, 1 - low, 1 + high) A) + beta (exp(d) - 1 - d)      (k3)
    loss    = sum_t w[t] loss[t],    w[t] = 0 where the mask is 0, else
        grpo     1 / (tokens of its sequence x sequences)      mean of the sequences' means
        dr_grpo  1 / (max_tokens x sequences)                  a constant (Dr. GRPO, 2503.20783)
        dapo     1 / tokens of the batch                       token mean (DAPO, 2503.14476)
        ppo      1 / tokens of the batch                       token mean
The gradient of a token is w[t] (-A r [r A <= clamp(r) A] + beta (1 - exp(d))); where the clip is
active, the first term is 0.

Sums: float64, in an order that depends only on the length of the batch. torch backend: by halves
of the batch (`rows.tree_sum`). triton: by blocks of tokens (`kernels.py`), so the two backends may
differ in the last bit of a loss or a metric.
Everything is elementwise on [T] vectors, once a step; on triton a handful of small launches, whose
cost is negligible beside a matrix product.

T = tokens   B = sequences
"""

from dataclasses import dataclass

from torch import Tensor

from rlk_kernels.errors import UnsupportedShape
from rlk_kernels.numerics.rows import tree_sum

LOSS_TYPES = ("grpo", "dr_grpo", "dapo", "ppo")
METRICS = (
    "tokens", "clip_fraction", "clip_low_fraction", "clip_high_fraction", "k1", "k3", "ratio_mean",
    "logp_mean", "ratio_min", "ratio_max", "ref_k3",
)  # fmt: skip
"""The scalars of `reduce_loss`, in this order; the last where ref_logp is given."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What a token's loss depends on."""

    beta: float
    low: float
    high: float


def group_advantages(
    rewards: Tensor, group_size: int, *, scale: str = "std", eps: float = 1e-6
) -> Tensor:
    """Rewards minus their group's mean, optionally over its standard deviation -> [B] float32.

    rewards[B]: B / group_size groups of consecutive samples. scale: "std" divides by the group's
    sample deviation + eps (GRPO), "none" does not (Dr. GRPO). Sums in float64, by halves of the
    group.
    Raises UnsupportedShape, ValueError.
    """
    if rewards.dim() != 1 or group_size < 1 or rewards.shape[0] % group_size:
        raise UnsupportedShape(
            f"group_advantages: rewards {tuple(rewards.shape)} cannot be split into groups of "
            f"{group_size}"
        )
    if scale not in ("std", "none"):
        raise ValueError(f"group_advantages: scale {scale!r} is unknown; choose 'std' or 'none'")
    x = rewards.double().view(-1, group_size)
    x = x - x[:, :1]  # equal rewards give exactly 0: their mean may be rounded
    x = x - tree_sum(x) / group_size
    if scale == "std":
        x = x / ((tree_sum(x * x) / max(group_size - 1, 1)).sqrt() + eps)
    return x.flatten().float()


def by_sequence(advantages: Tensor, sequences: int) -> bool:
    """Whether advantages are [B], one for each sequence, rather than one for each token."""
    return advantages.dim() == 1 and advantages.shape[0] == sequences
