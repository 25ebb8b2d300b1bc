"""linear_sample: one token per row of hidden states, and its log-probability, without all logits in
memory.

    x[t, v] = round( sum_h hidden[t, h] weight[v, h] + bias[v] )       fp32, then logit_dtype

The rest is `sample` on x without truncation: the draw, the log-probs, and what a row without a
distribution gets.

Order: the sum over h is in the order of `linear`, the sums over v and the draw are in the tree of
`numerics/lse_tree`. So `linear_sample(h, w, keys, positions, logit_dtype=D)` has the bits of
`sample(linear(h, w, out_dtype=D), keys, positions)` on either backend, and a token depends on its
row's hidden state, key, position and temperature, and on the weight and the bias alone.

Triton: the logits of a chunk of columns at a time are in memory, at most `kernels.LOGITS_BYTES`. A
chunk consists of blocks of columns, which are whole subtrees. For each block a program writes its
node, and the column to which the walk would go from this node; the walk through the blocks above
them then takes one of these columns.
torch: the logits of a few rows at a time are in memory.

T = rows   V = vocabulary   H = hidden size
"""

import torch
from torch import Tensor

from rlk_kernels.backend import choose, record
from rlk_kernels.custom_op import call, custom_op
from rlk_kernels.device import lazy_module
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.ops.linear import check_weight
from rlk_kernels.ops.linear_sample import portable
from rlk_kernels.ops.sample.operator import (
    MOST_COLUMNS,
    Number,
    Sampled,
    check_requests,
    temperatures,
)

NO_GRADIENT = "a choice has no gradient; `linear_logp` of the ids has"

_on_triton = lazy_module("rlk_kernels.ops.linear_sample.kernels")


def _fake(hidden, weight, bias, keys, positions, temperature, logit_dtype, raw, backend):
    t = hidden.shape[0]
    numbers = [hidden.new_empty(n, dtype=torch.float32) for n in (t, t, t if raw else 0)]
    kept = hidden.new_empty(t, dtype=torch.int32)
    return hidden.new_empty(t, dtype=torch.int64), numbers[0], kept, *numbers[1:]


@custom_op("linear_sample", _fake, no_gradient=("linear_sample", NO_GRADIENT))
def _linear_sample(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, keys: Tensor, positions: Tensor,
    temperature: Tensor, logit_dtype: torch.dtype, raw: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    arguments = (hidden, weight, bias, keys, positions, temperature, logit_dtype, raw)
    if backend == "torch":
        results, ran = portable.linear_sample(*arguments), "torch"
    else:
        results, ran = _on_triton().linear_sample(*arguments)
    record("linear_sample", ran)
    return results


def _check(hidden: Tensor, weight: Tensor, bias: Tensor | None, logit_dtype: torch.dtype) -> None:
    of_hidden, of_weight = hidden.shape, weight.shape
    fits = len(of_hidden) == len(of_weight) == 2 and of_hidden[1] == of_weight[1]
    if not fits or not 0 < of_weight[0] <= MOST_COLUMNS:
        raise UnsupportedShape(
            f"linear_sample: hidden[T, H] and weight[V, H] with 1 <= V <= {MOST_COLUMNS} are "
            f"needed, not {tuple(of_hidden)} and {tuple(of_weight)}"
        )
    check_weight("linear_sample", "hidden", hidden, weight, bias)
    if hidden.dtype == torch.float64:
        raise UnsupportedDtype(
            "linear_sample: hidden is torch.float64, whose products have no fixed order; 16 or 32 "
            "bits are needed"
        )
    if logit_dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise UnsupportedDtype(
            f"linear_sample: logit_dtype is {logit_dtype}; a floating dtype of 16 or 32 bits is "
            "needed"
        )


def linear_sample(
    hidden: Tensor,
    weight: Tensor,
    keys: Tensor,
    positions: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: Number = None,
    logit_dtype: torch.dtype = torch.float32,
    raw_logprobs: bool = False,
    backend: str | None = None,
) -> Sampled:
    """One token of each row of hidden[T, H], with the bits of
    `sample(linear(hidden, weight, bias, out_dtype=logit_dtype), keys, positions, ...)`.

    hidden[T, H], weight[V, H]: one dtype of bfloat16, float16, float32; bias[V]: that dtype or
    float32, -inf where a column is never drawn, such as the padding of a vocabulary. logit_dtype:
    float32, bfloat16 or float16, to which the logits are rounded first, as in `linear_logp`.
    keys[T], positions[T], temperature and raw_logprobs are those of `sample`, and so is the result,
    whose mass is 1.

    Top-k, top-p, min-p, penalties and masks of single rows need the logits: use `linear` and
    `sample`. Ranks that share the vocabulary have a part of the weight each: `sample_parallel`
    draws from their logits.

    Nothing is copied to the host and nothing waits, so a call can be captured in a CUDA graph
    (temperature as a tensor). Raises UnsupportedShape, UnsupportedDtype, ValueError, and what
    `backend.choose` raises. The result has no gradient.
    """
    _check(hidden, weight, bias, logit_dtype)
    check_requests("linear_sample", keys, positions, hidden)
    heat = temperatures("linear_sample", temperature, hidden)
    chosen = choose("linear_sample", backend, hidden, weight, bias, keys, positions, heat)
    return Sampled(
        *call(
            _linear_sample, hidden, weight, None if bias is None else bias.contiguous(),
            keys.contiguous(), positions.long().contiguous(), heat, logit_dtype, raw_logprobs,
            chosen,
        )
    )  # fmt: skip
