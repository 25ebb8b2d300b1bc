"""linear_logp with the weight's rows, the vocabulary, divided among ranks: the log-prob of a token
from the hidden state, without all logits in memory, with the bits of `linear_logp` on one rank.

The logits of `ROWS` rows at a time are computed in fp32 over this rank's columns, and their
log-prob as in `parallel/logp.py`. Gradients have the bits of `logp(linear(hidden, weight,
out_dtype=float32), target)` on one rank: dweight sums over all rows, for `COLUMNS` of this rank's
columns at a time, and dhidden over the gathered columns of dlogits. (The gradients of `linear_logp`
are more exact where a token is nearly certain.)

T = tokens   V = vocabulary   H = hidden size   R = ranks
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlk_kernels.backend import choose
from rlk_kernels.custom_op import on_device_of
from rlk_kernels.ops.linear import bias_grad, input_grad, linear, weight_grad
from rlk_kernels.ops.linear_logp.operator import check
from rlk_kernels.ops.logp.operator import logp_grad
from rlk_kernels.parallel.copies import Group, gather_columns, rank_of, rows_to_columns
from rlk_kernels.parallel.entropy import entropy_and_lse, entropy_grad
from rlk_kernels.parallel.linear import check_divides
from rlk_kernels.parallel.logp import check_shard, local_target, logp_and_root

ROWS, COLUMNS = 1024, 4096
"""The rows and columns of the logits that are in memory at a time. No bit depends on them."""


@dataclass(frozen=True)
class _Head:
    """This rank's rows of the output layer."""

    weight: Tensor
    bias: Tensor | None
    real: int
    """The number of these rows that are tokens; the others pad the vocabulary."""
    backend: str

    def logits(self, hidden: Tensor, columns: slice) -> Tensor:
        """fp32 logits of some columns; padding is -inf."""
        bias = None if self.bias is None else self.bias[columns]
        weight = self.weight[columns]
        out = linear(hidden, weight, bias, out_dtype=torch.float32, backend=self.backend)
        out[:, max(self.real - columns.start, 0) :] = -torch.inf
        return out

    def dlogits(
        self, hidden: Tensor, columns: slice, target: Tensor, root: Tensor, entropy: Tensor,
        g: Tensor, g_entropy: Tensor,
    ) -> Tensor:  # fmt: skip
        """The gradient of some columns' logits, rounded to hidden's dtype. target: the result of
        `local_target`; entropy: that of `entropy_and_lse`, without columns if there is no
        entropy."""
        logits = self.logits(hidden, columns)
        inside = (target >= columns.start) & (target < columns.start + logits.shape[1])
        own = torch.where(inside, target - columns.start, logits.shape[1])
        own = torch.where(target < 0, target, own)
        d = logp_grad(logits, own, root, g, self.backend)
        if entropy.shape[1]:
            d += entropy_grad(logits, entropy, g_entropy)
        return d.to(hidden.dtype)


class _LinearLogp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
        group: Group, real: int, backend: str, with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        head, every = _Head(weight, bias, real, backend), slice(0, len(weight))
        pieces = []
        for h, some in zip(hidden.split(ROWS), target.split(ROWS), strict=True):
            logits = head.logits(h, every)
            none = logits.new_empty(len(h), 0, dtype=torch.float64)
            entropy = entropy_and_lse(logits, group) if with_entropy else none
            pieces.append((*logp_and_root(logits, some, group, backend), entropy))
        logp, root, entropy = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        own = local_target(target, rank_of(group), len(weight))
        ctx.save_for_backward(hidden, weight, bias, own, root, entropy)
        ctx.group, ctx.real, ctx.backend = group, real, backend
        return logp, entropy[:, 0].float() if with_entropy else logp.new_empty(0)

    @staticmethod
    def backward(ctx: Any, g: Tensor, g_entropy: Tensor) -> Any:
        hidden, weight, bias, *rows = ctx.saved_tensors
        upstream = g, g_entropy if len(g_entropy) else torch.zeros_like(g)
        head, rows = _Head(weight, bias, ctx.real, ctx.backend), (*rows, *upstream)
        dh = dw = db = None
        with on_device_of(hidden):
            if ctx.needs_input_grad[0]:
                dh = _hidden_grad(head, hidden, rows, ctx.group)
            if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
                dw, db = _weight_grads(head, hidden, rows)
        return dh, dw, db, None, None, None, None, None


def _hidden_grad(head: _Head, hidden: Tensor, rows: tuple[Tensor, ...], group: Group) -> Tensor:
    weight, every = rows_to_columns(head.weight, group), slice(0, len(head.weight))
    parts = []
    for some in zip(hidden.split(ROWS), *(x.split(ROWS) for x in rows), strict=True):
        d = gather_columns(head.dlogits(some[0], every, *some[1:]), group)
        parts.append(input_grad(d, weight, head.backend))
    return gather_columns(torch.cat(parts), group)


def _weight_grads(
    head: _Head, hidden: Tensor, rows: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor | None]:
    weights, biases = [], []
    for first in range(0, len(head.weight), COLUMNS):
        d = head.dlogits(hidden, slice(first, first + COLUMNS), *rows)
        weights.append(weight_grad(d, hidden, head.weight.dtype, head.backend))
        if head.bias is not None:
            biases.append(bias_grad(d, head.bias.dtype, head.backend))
    return torch.cat(weights), torch.cat(biases) if biases else None


def linear_logp_parallel(
    hidden: Tensor, weight: Tensor, target: Tensor, group: Group, *,
    bias: Tensor | None = None, vocabulary: int | None = None, return_entropy: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """log softmax(hidden @ weight^T + bias)[t, target[t]] as [T], for hidden[T, H] and this rank's
    rows weight[V / R, H] and bias[V / R]. target[T] is an id of the whole vocabulary; a negative
    one is ignored. vocabulary: the number of ids, if the weight's last rows are padding. With
    return_entropy: (the log-probs, the entropy[T] of each row), both differentiable.

    Call this on all ranks of the group with the same hidden states and targets, and its backward
    with the same gradient; None is one rank. Raises UnsupportedShape if a shard is not a multiple
    of LEAF columns, or if the ranks do not divide H."""
    check("linear_logp", hidden, weight, target, bias)
    rows = len(weight)
    check_shard("linear_logp", rows, group)
    check_divides("hidden features", weight.shape[1], group)
    real = rows if vocabulary is None else min(max(vocabulary - rank_of(group) * rows, 0), rows)
    chosen = choose("linear_logp", backend, hidden, weight, target, bias)
    logp, entropy = _LinearLogp.apply(
        hidden, weight, bias, target, group, real, chosen, return_entropy
    )
    return (logp, entropy) if return_entropy else logp
