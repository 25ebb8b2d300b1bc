"""policy_loss: policy losses from log-probabilities; dpo_loss: DPO's loss from preferred pairs.

The terms of a token and the weights of tokens are those of `objective.py`.

    dpo    mean over pairs of -log sigmoid(beta (gain of the chosen - gain of the rejected)),
           gain the sum of logp - ref_logp over a sequence

Everything is float64 on [T] vectors, on any device, with explicit gradients and without atomics.
The order of a sum over a sequence depends on that sequence alone, and the order of a sum over the
batch (by halves) on its length alone.

T = tokens   B = sequences
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlk_kernels.backend import choose
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.losses.policy.advantages import by_sequence
from rlk_kernels.losses.policy.objective import (
    AVERAGES,
    Objective,
    Sequences,
    batch_sums,
    check_numbers,
    check_objective,
    pair_of,
    sequence_of,
    sequence_sums,
    token_terms,
    token_weights,
)
from rlk_kernels.numerics.dtypes import wide_dtype
from rlk_kernels.numerics.rows import tree_sum
from rlk_kernels.ops.linear_logp.operator import linear_logp


class _WithSlope(torch.autograd.Function):
    """A loss whose derivative with respect to `logp` is given."""

    @staticmethod
    def forward(ctx: Any, logp: Tensor, loss: Tensor, slope: Tensor) -> Tensor:
        # not in fp16, where a slope would underflow before a loss scale multiplies it
        wide = wide_dtype(logp.dtype)
        ctx.save_for_backward(slope.to(wide))
        ctx.dtype = logp.dtype
        return loss.to(wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return torch.where(slope == 0, 0.0, g * slope).to(ctx.dtype), None, None


def policy_loss(
    logp: Tensor,
    old_logp: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    cu_seqlens: Tensor,
    loss_type: str = "grpo",
    clip: tuple[float, float] = (0.2, 0.2),
    max_tokens: int | None = None,
    rollout_logp: Tensor | None = None,
    correction: str | None = None,
    limits: tuple[float, float] = (0.0, 2.0),
    ref_logp: Tensor | None = None,
    beta: float = 0.0,
    kl: str = "k3",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns (loss, metrics). The loss (see above) is a float32 scalar, differentiable in logp.

    logp, old_logp, rollout_logp, ref_logp and mask are packed [T], with cu_seqlens[B + 1] from 0 to
    T; mask is 1 for tokens that count. old_logp None: logp itself, so that the ratio is 1.
    advantages: [B], one for each sequence, or, except for gspo, one for each token. `correction`
    needs rollout_logp, beta above 0 needs ref_logp, and dr_grpo needs max_tokens.

    metrics: detached float32 scalars over the tokens that count: tokens, clip_fraction, ratio_mean,
    ratio_max, correction_mean, and kl before it is multiplied by beta. Raises UnsupportedShape,
    UnsupportedDtype, UnsupportedDevice, ValueError.
    """
    name = "policy_loss"
    low, high = pair_of(name, "clip", clip)
    limits = pair_of(name, "limits", limits)
    objective = Objective(loss_type, low, high, correction, limits, kl, beta)
    check_objective(name, objective, tuple(AVERAGES), max_tokens, rollout_logp, ref_logp)
    per_token = {"logp": logp, "mask": mask}
    others = {"old_logp": old_logp, "rollout_logp": rollout_logp, "ref_logp": ref_logp}
    per_token |= {what: x for what, x in others.items() if x is not None}
    cu = _bounds(name, cu_seqlens, per_token, advantages=advantages)
    sequences, t = len(cu) - 1, len(logp)
    if by_sequence(advantages, sequences):
        advantages = advantages[sequence_of(t, cu)]
    elif advantages.shape != (t,) or loss_type == "gspo":
        raise UnsupportedShape(
            f"{name}: advantages {tuple(advantages.shape)}; {loss_type} takes one for each of "
            f"{sequences} sequences" + ("" if loss_type == "gspo" else f", or of {t} tokens")
        )
    with torch.no_grad():
        on = mask != 0
        old = logp if old_logp is None else old_logp
        of_batch = Sequences(on, cu)
        terms = token_terms(logp, old, advantages, ref_logp, objective, of_batch, rollout_logp)
        w = token_weights(on, cu, AVERAGES[loss_type], max_tokens)
        value, slope = (torch.where(on, w * x, 0.0) for x in (terms.value, terms.slope))
        columns = [value, on, terms.active, terms.ratio, terms.factor, terms.kl]
        (total, tokens), means = batch_sums(on, columns)
        highest = torch.where(on, terms.ratio, 0.0).amax() if t else total.new_zeros(())
    names = ("clip_fraction", "ratio_mean", "correction_mean", "kl")
    metrics = {"tokens": tokens.float(), **dict(zip(names, means.float().unbind(), strict=True))}
    return _WithSlope.apply(logp, total, slope), metrics | {"ratio_max": highest.float()}


def linear_policy_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, old_logp: Tensor | None, advantages: Tensor,
    mask: Tensor, *, cu_seqlens: Tensor, bias: Tensor | None = None, temperature: float = 1.0,
    backend: str | None = None, **objective: Any,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """`policy_loss` of `linear_logp(hidden, weight, target)`, without logits in memory: the loss,
    differentiable in hidden[T, H], weight[V, H] and bias[V], and the metrics with `logp` [T].

    A token whose target is negative is masked out. `objective`: the keywords of `policy_loss`.
    For grpo, dr_grpo, dapo and ppo without a correction, `linear_grpo_loss` needs one product less.
    Raises what these two raise.
    """
    logp = linear_logp(hidden, weight, target, bias=bias, temperature=temperature, backend=backend)
    assert isinstance(logp, Tensor)  # no other output was requested
    _bounds("linear_policy_loss", cu_seqlens, {"logp": logp, "mask": mask})
    on = (mask != 0) & (target >= 0)
    loss, metrics = policy_loss(logp, old_logp, advantages, on, cu_seqlens=cu_seqlens, **objective)
    return loss, metrics | {"logp": logp.detach()}


def dpo_loss(
    logp: Tensor, ref_logp: Tensor, mask: Tensor, *, cu_seqlens: Tensor, beta: float = 0.1
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns (loss, metrics) of packed sequences that alternate between chosen and rejected. The
    loss of DPO (see above) is a float32 scalar, differentiable in logp; the metrics are the float32
    scalars accuracy and margin, which are means over pairs.

    logp, ref_logp and mask are [T], cu_seqlens[B + 1] with B even. Raises UnsupportedShape,
    UnsupportedDtype, UnsupportedDevice, ValueError.
    """
    name = "dpo_loss"
    cu = _bounds(name, cu_seqlens, {"logp": logp, "ref_logp": ref_logp, "mask": mask})
    pairs = (len(cu) - 1) // 2
    if len(cu) % 2 == 0 or pairs == 0:
        raise UnsupportedShape(f"{name}: {len(cu) - 1} sequences are not pairs")
    if not beta > 0:
        raise ValueError(f"{name}: beta must be above 0, not {beta}")
    with torch.no_grad():
        on = mask != 0
        gain = torch.where(on, logp.double() - ref_logp.double(), 0.0)
        chosen, rejected = sequence_sums(gain, cu).view(pairs, 2).unbind(1)
        margin = beta * (chosen - rejected)
        loss = tree_sum(-torch.nn.functional.logsigmoid(margin))[0] / pairs
        pull = -beta * torch.sigmoid(-margin) / pairs
        of_sequence = torch.stack([pull, -pull], 1).flatten()
        slope = torch.where(on, of_sequence[sequence_of(len(logp), cu)], 0.0)
        right = tree_sum((margin > 0).double())[0] / pairs
    metrics = {"accuracy": right.float(), "margin": (tree_sum(margin)[0] / pairs).float()}
    return _WithSlope.apply(logp, loss, slope), metrics


def _bounds(
    name: str, cu_seqlens: Tensor, per_token: dict[str, Tensor], **others: Tensor
) -> Tensor:
    """cu_seqlens in int64. Raises UnsupportedShape if it or an input [T] does not fit, and
    UnsupportedDtype and UnsupportedDevice, for the `others` too."""
    check_numbers(name, per_token | others)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise UnsupportedDtype(
            f"{name}: cu_seqlens is {cu_seqlens.dtype}; int32 or int64 is needed"
        )
    choose(name, "torch", per_token["logp"], cu_seqlens, *per_token.values(), *others.values())
    t = per_token["logp"].shape
    wrong = {what: tuple(x.shape) for what, x in per_token.items() if x.shape != t or x.dim() != 1}
    if wrong:
        raise UnsupportedShape(f"{name}: inputs must be [T], one number a token, not {wrong}")
    cu = cu_seqlens.long()
    rises = cu.dim() == 1 and len(cu) > 1 and bool((cu[1:] >= cu[:-1]).all())
    if not rises or int(cu[0]) != 0 or int(cu[-1]) != t[0]:
        raise UnsupportedShape(
            f"{name}: cu_seqlens must rise from 0 to the {t[0]} tokens, not {cu_seqlens.tolist()}"
        )
    return cu
