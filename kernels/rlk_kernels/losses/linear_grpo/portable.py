"""`linear_grpo_loss` in PyTorch: the portable forward and backward of `linear_logp`."""

import torch
from torch import Tensor

from rlk_kernels.losses.policy.objective import Objective, token_terms
from rlk_kernels.losses.policy.portable import prepare, reduce_loss
from rlk_kernels.ops.linear_logp import portable as linear_logp
from rlk_kernels.ops.linear_logp.options import LogitOptions

__all__ = ["logp_alone", "logp_and_gradients", "prepare", "reduce_loss", "scale"]


def logp_and_gradients(
    h: Tensor, w: Tensor, bias: Tensor | None, ids: Tensor,
    tokens: tuple[Tensor | None, Tensor, Tensor | None, Tensor], spec: LogitOptions,
    objective: Objective, needs: list[bool],
) -> tuple[Tensor, list[Tensor | None], str]:  # fmt: skip
    """(logp[T], [dh, dw, db], the implementation that ran); tokens: old_logp, advantages, ref_logp,
    weights."""
    old, advantages, ref, weights = tokens
    rows = linear_logp.forward(h, w, bias, ids[:, None], spec, False)
    logp = rows.logp.squeeze(1)
    slope = token_terms(logp, logp if old is None else old, advantages, ref, objective).slope
    g = torch.where(weights == 0, 0.0, slope * weights)[:, None]
    grads = list(linear_logp.backward(h, w, bias, ids[:, None], rows, g, None, None, spec, needs))
    if bias is not None and grads[2] is not None:
        grads[2] = grads[2].to(bias.dtype)
    return logp, grads, "torch"


def logp_alone(
    h: Tensor, w: Tensor, bias: Tensor | None, ids: Tensor, spec: LogitOptions
) -> tuple[Tensor, str]:
    """(logp[T], the implementation that ran)."""
    return linear_logp.forward(h, w, bias, ids[:, None], spec, False).logp.squeeze(1), "torch"


def scale(x: Tensor, factor: Tensor) -> Tensor:
    """x times factor[()]; for a factor of 1 x unchanged, with its NaN and infinities."""
    return torch.where(factor == 1, x, (x * factor).to(x.dtype))
