"""The advantages of a policy's samples."""

from torch import Tensor

from rlk_kernels.errors import UnsupportedShape
from rlk_kernels.numerics.rows import tree_sum


def group_advantages(
    rewards: Tensor, group_size: int, *, scale: str = "std", eps: float = 1e-6
) -> Tensor:
    """Rewards minus their group's mean, optionally over its standard deviation -> [B] float32.

    rewards[B]: B / group_size groups of consecutive samples. scale: "std" divides by the group's
    sample deviation + eps (GRPO), "none" does not (Dr. GRPO). Sums are in float64, by halves of the
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
    x = x - x[:, :1]  # so that equal rewards give exactly 0 although their mean is rounded
    x = x - tree_sum(x) / group_size
    if scale == "std":
        x = x / ((tree_sum(x * x) / max(group_size - 1, 1)).sqrt() + eps)
    return x.flatten().float()


def by_sequence(advantages: Tensor, sequences: int) -> bool:
    """Whether advantages are [B], one for each sequence, rather than one for each token."""
    return advantages.dim() == 1 and advantages.shape[0] == sequences
