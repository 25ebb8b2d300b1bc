"""`prepare` and `reduce_loss` in PyTorch: elementwise, and sums by halves of the batch."""

import math

import torch
from torch import Tensor

from rlk_kernels.losses.policy.objective import (
    METRICS,
    Objective,
    batch_sums,
    sequence_of,
    token_terms,
    token_weights,
)


def prepare(
    target: Tensor, mask: Tensor, advantages: Tensor, spread: bool, cu_seqlens: Tensor | None,
    sequences: int, loss_type: str, max_tokens: int | None, ignore_index: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(ids int64, -1 where ignored; advantages; weights float64) [T], from target[T] and mask[T].

    advantages: [T], or with `spread` [B], one for the tokens of each sequence. cu_seqlens[B + 1];
    None: sequences of equal length.
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


def reduce_loss(
    logp: Tensor, old_logp: Tensor | None, advantages: Tensor, weights: Tensor,
    ref_logp: Tensor | None, objective: Objective,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """The loss (float64) and the metrics (float32 scalars) of a batch of tensors [T].

    The metrics are `tokens`, the number of tokens whose weight is not 0, and over these tokens
    clip_fraction, clip_low_fraction, clip_high_fraction, k1 and k3 (of the old policy against the
    new one: -log r and r - 1 - log r), ratio_mean, ratio_min, ratio_max and logp_mean; with
    ref_logp also ref_k3 (as in the loss, before it is multiplied by beta). Without such a token all
    are 0, and ratio_min is infinity. old_logp None: logp.
    """
    old = logp if old_logp is None else old_logp
    terms = token_terms(logp, old, advantages, ref_logp, objective)
    log_ratio, ratio, on = logp.double() - old.double(), terms.ratio, weights != 0
    low, high = terms.active & (ratio < 1.0), terms.active & (ratio > 1.0)
    columns = [terms.value * weights, on, terms.active, low, high, -log_ratio]
    columns += [torch.expm1(log_ratio) - log_ratio, ratio, logp]
    columns += [] if ref_logp is None else [terms.kl]
    (value, tokens), means = batch_sums(on, columns)
    lowest = torch.where(on, ratio, float("inf"))
    highest = torch.where(on, ratio, 0.0)
    least, most = (lowest.amin(), highest.amax()) if on.numel() else value.new_tensor([math.inf, 0])
    values = [tokens, *means[:7], least, most, *means[7:]]
    names = METRICS if ref_logp is not None else METRICS[:-1]
    return value, {name: x.float() for name, x in zip(names, values, strict=True)}
