"""`prepare` and `reduce_loss` in PyTorch: elementwise, and sums by halves of the batch."""

import math

import torch
from torch import Tensor

from rlk_kernels.losses.grpo.operator import METRICS, Loss
from rlk_kernels.numerics.rows import tree_sum


def prepare(
    target: Tensor, mask: Tensor, advantages: Tensor, spread: bool, cu_seqlens: Tensor | None,
    sequences: int, loss_type: str, max_tokens: int | None, ignore_index: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(ids int64, -1 where ignored; advantages; weights float64) [T], from target[T] and mask[T].

    advantages: [T], or [B] to be spread over their tokens. cu_seqlens[B + 1], None: sequences of
    equal length.
    """
    t = target.shape[0]
    if cu_seqlens is None:
        cu_seqlens = torch.arange(sequences + 1, device=target.device) * (t // max(sequences, 1))
    cu_seqlens = cu_seqlens.long()
    ids = target.long()
    ids = torch.where((ids == ignore_index) | (ids < 0), -1, ids)
    if spread:
        advantages = advantages[sequence_of(t, cu_seqlens)] if t else advantages[:0]
    on = (mask != 0) & (ids >= 0)
    return ids, advantages, token_weights(on, cu_seqlens, loss_type, max_tokens)


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
    """Running count of zeros and ones: whole numbers, so any order of additions is exact."""
    return w.to(torch.int64).cumsum(0).double()


def sequence_of(t: int, cu_seqlens: Tensor) -> Tensor:
    """[T] index of the sequence that a token belongs to."""
    token = torch.arange(t, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)


def token_terms(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, ref_logp: Tensor | None, loss: Loss
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, its derivative in logp, log ratio, whether the clip is active) [T], in float64."""
    log_ratio = logp.double() - old_logp.double()
    ratio = log_ratio.exp()
    a = advantages.double()
    free = torch.where((a == 0) & ratio.isinf(), 0.0, ratio * a)
    held = ratio.clamp(1.0 - loss.low, 1.0 + loss.high) * a
    active = free > held
    value = -torch.where(active, held, free)
    slope = torch.where(active, 0.0, -free)
    if ref_logp is not None and loss.beta:
        d = ref_logp.double() - logp.double()
        value = value + loss.beta * (torch.expm1(d) - d)
        slope = slope - loss.beta * torch.expm1(d)
    return value, slope, log_ratio, active


def reduce_loss(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, w: Tensor,
    ref_logp: Tensor | None, loss: Loss,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """The loss (float64) and the metrics (float32 scalars) of a batch.

    tokens; over masked-in tokens: clip_fraction, clip_low_fraction, clip_high_fraction, k1 and k3
    (of the old policy against the new: -log r and r - 1 - log r), ratio_mean, ratio_min, ratio_max,
    logp_mean; ref_k3 (as in the loss, before beta) where ref_logp is given. Where no token is
    masked in: 0, and infinity for ratio_min.
    """
    value, _, log_ratio, active = token_terms(logp, old_logp, advantages, ref_logp, loss)
    ratio = log_ratio.exp()
    on = mask.bool()
    low, high = active & (ratio < 1.0), active & (ratio > 1.0)
    sums = [value * w, on, active, low, high, -log_ratio, torch.expm1(log_ratio) - log_ratio]
    sums += [ratio, logp]
    if ref_logp is not None:
        d = ref_logp.double() - logp.double()
        sums.append(torch.expm1(d) - d)
    total = tree_sum(torch.stack([torch.where(on, x.double(), 0.0) for x in sums])).squeeze(-1)
    count = total[1].clamp(min=1.0)
    lowest = torch.where(on, ratio, float("inf"))
    highest = torch.where(on, ratio, 0.0)
    least, most = (lowest.amin(), highest.amax()) if on.numel() else total.new_tensor([math.inf, 0])
    means = (total[2:] / count).unbind()
    values = [total[1], *means[:7], least, most, *means[7:]]
    names = METRICS if ref_logp is not None else METRICS[:-1]
    return total[0], {name: x.float() for name, x in zip(names, values, strict=True)}
