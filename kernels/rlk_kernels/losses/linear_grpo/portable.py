"""`linear_grpo_loss` in PyTorch: the portable forward and backward of `linear_logp`."""

import torch
from torch import Tensor

from rlk_kernels.losses.policy.objective import Objective, token_terms
from rlk_kernels.losses.policy.portable import prepare, reduce_loss
from rlk_kernels.ops.linear_logp import portable as linear_logp
from rlk_kernels.ops.linear_logp.options import LogitOptions

__all__ = ["loss_and_gradients", "prepare", "scale"]


def loss_and_gradients(
    h: Tensor, w: Tensor, bias: Tensor | None, ids: Tensor,
    tokens: tuple[Tensor | None, Tensor, Tensor | None, Tensor], spec: LogitOptions,
    objective: Objective, needs: list[bool],
) -> tuple[Tensor, dict[str, Tensor], Tensor, list[Tensor | None], str]:  # fmt: skip
    """(loss, metrics, logp[T], [dh, dw, db], what ran); tokens: old_logp, advantages, ref_logp,
    weights."""
    old, advantages, ref, weights = tokens
    ids = ids[:, None]
    rows = linear_logp.forward(h, w, bias, ids, spec, False)
    logp = rows.logp.squeeze(1)
    grads: list[Tensor | None] = [None, None, None]
    if any(needs):
        slope = token_terms(logp, logp if old is None else old, advantages, ref, objective).slope
        g = torch.where(weights == 0, 0.0, slope * weights)[:, None]
        grads = list(linear_logp.backward(h, w, bias, ids, rows, g, None, None, spec, needs))
        if bias is not None and grads[2] is not None:
            grads[2] = grads[2].to(bias.dtype)
    value, metrics = reduce_loss(logp, old, advantages, weights, ref, objective)
    return value, metrics, logp, grads, "torch"


def scale(x: Tensor, factor: Tensor) -> Tensor:
    """x times factor[()]; x itself, whatever it holds, for a factor of 1."""
    return torch.where(factor == 1, x, (x * factor).to(x.dtype))
