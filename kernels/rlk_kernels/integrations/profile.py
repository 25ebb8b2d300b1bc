"""The operators of a decoder as every engine calls them: one order and one set of roundings for
all. PROFILE.md states them in words, and a test covers each line of it.

Engines differ only in how they lay out and batch their rows: each function here gives a row the
same bits whatever the other rows are.
T = rows (all leading dimensions)   H = heads   D = head size   R = rotated pairs   V = vocabulary
"""

import struct
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

import rlk_kernels
from rlk_kernels.integrations.errors import NotServed
from rlk_kernels.parallel.context import context_attention
from rlk_kernels.parallel.linear_logp import linear_logp_parallel
from rlk_kernels.parallel.logp import logp_parallel
from rlk_kernels.parallel.rms_norm import Shared, rms_norm_parallel


def embed(ids: Tensor, weight: Tensor) -> Tensor:
    """[..., F]: copies of the rows of weight[V, F]."""
    return rlk_kernels.embedding(ids, weight)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension; one rounding, from fp32."""
    _check_norm(x, weight)
    return rlk_kernels.rms_norm(x, weight, eps, cast="vllm")


def shared_norm(
    x: Tensor, weight: Tensor, eps: float, shared: Shared, group: ProcessGroup | None
) -> Tensor:
    """`norm` of rows that the ranks of a group share, as `parallel.rms_norm` says."""
    _check_norm(x, weight)
    return rms_norm_parallel(x, weight, eps, shared, group, cast="vllm")


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of the sum, the sum); the sum is rounded to x's dtype before the norm reads it."""
    _check_norm(x, weight)
    return rlk_kernels.rms_norm(x, weight, eps, residual=residual, cast="vllm")


def _check_norm(x: Tensor, weight: Tensor) -> None:
    """Raises NotServed for a weight of another dtype: other engines would not have it."""
    if x.dtype != weight.dtype:
        raise NotServed(f"a norm's weight in {weight.dtype} is not served for rows in {x.dtype}")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight^T + bias, rounded once: the bias is added to the fp32 sum."""
    return rlk_kernels.linear(x, weight, bias)


def add_shared(routed: Tensor, shared: Tensor) -> Tensor:
    """The rounded sum of a token's rows plus the row of its shared experts, in fp32, rounded."""
    return routed + shared


def logits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same in fp32: the accumulator itself, not rounded to the model's dtype."""
    return rlk_kernels.linear(x, weight, bias, out_dtype=torch.float32)


def router(x: Tensor, weight: Tensor) -> Tensor:
    """The logits of all experts, fp32 [T, E] of x[T, H]: the accumulator itself, as `logits`."""
    return rlk_kernels.linear(x, weight, out_dtype=torch.float32)


def route(logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """(weights fp32 [T, k], ids int32 [T, k]): the k largest, ties to the lowest id, ascending; the
    softmax over them (normalize), or over all experts."""
    return rlk_kernels.route(logits, k, normalize=normalize)


class Correction(NamedTuple):
    """How routers that correct their scores choose experts and weight them."""

    bias: Tensor
    """fp32 [E], added to the scores for the choice alone."""
    groups: int
    top_groups: int
    scale: float


def route_corrected(
    logits: Tensor, k: int, normalize: bool, correction: Correction
) -> tuple[Tensor, Tensor]:
    """(weights fp32 [T, k], ids int32 [T, k]): the k largest corrected scores of the best groups,
    ties to the lowest id, ascending; the scores themselves, divided by their sum (normalize), and
    scaled."""
    bias, groups, top_groups, scale = correction
    return rlk_kernels.route_corrected(
        logits, bias, k, normalize=normalize, groups=groups, top_groups=top_groups, scale=scale
    )


def weights_of(
    logits: Tensor, ids: Tensor, normalize: bool, correction: Correction | None = None
) -> Tensor:
    """fp32 [T, k]: the weights that `route`, or with a correction `route_corrected`, gives the
    experts ids[T, k], which ascend, also where another router chose them."""
    if correction is None and not normalize:
        every, _ = route(logits, logits.shape[1], normalize)
        return every.gather(1, ids.long())
    # Both weigh by the logits of the chosen alone.
    chosen, k = logits.gather(1, ids.long()), ids.shape[1]
    if correction is None:
        return route(chosen, k, normalize)[0]
    none = correction.bias.new_zeros(k)
    return route_corrected(chosen, k, normalize, Correction(none, 1, 1, correction.scale))[0]


def expert_groups(ids: Tensor, experts: int) -> rlk_kernels.ExpertGroups:
    """Which rows each expert has; shared by the products of a layer."""
    return rlk_kernels.group_by_expert(ids, experts)


def expert_linear(x: Tensor, weight: Tensor, groups: rlk_kernels.ExpertGroups) -> Tensor:
    """[T, k, N] of x[T, K] or x[T, k, K] and weight[E, N, K]: each row the bits of `linear`."""
    return rlk_kernels.grouped_linear(x, weight, groups)


def expert_act(x: Tensor, weight: Tensor, groups: rlk_kernels.ExpertGroups) -> Tensor:
    """[T, k, I]: `act` of the halves of `expert_linear` by weight[E, 2 I, K], bit for bit, in one
    kernel and without gradients."""
    return rlk_kernels.grouped_swiglu(x, weight, groups)


def combine(rows: Tensor, weights: Tensor, ids: Tensor, experts: int) -> Tensor:
    """[T, H]: rows[T, k, H] by their weights[T, k], added up in fp32 in ascending id, rounded once;
    no product is rounded together with a sum."""
    return rlk_kernels.combine_experts(rows, weights, ids, experts)


def rope(
    q: Tensor, k: Tensor, positions: Tensor, inv_freq: Tensor, scaling: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """q[T, H, D] and k[T, Hk, D] rotated by positions[T], halves as pairs: cos and sin times
    scaling and rounded to the model's dtype, fp32 arithmetic, one rounding. inv_freq, scaling:
    `rotary.rotation`."""
    return rlk_kernels.rope(
        q, k, positions, inv_freq=inv_freq, scaling=scaling, cos_sin_dtype=q.dtype
    )


def attention(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float,
    window: int | None = None, group: ProcessGroup | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention of packed sequences: q[T, H, D], k and v[S, Hk, D]. With `group`, whose
    ranks share the sequences, q, k and v are this rank's rows, and cu_q is of whole sequences."""
    if group is not None:
        return context_attention(q, k, v, cu_q, group, scale=float32(scale), window=window)
    return rlk_kernels.attention(q, k, v, cu_q, cu_k, scale=float32(scale), window=window)


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lengths: Tensor, cu_q: Tensor,
    scale: float, window: int | None, out: Tensor, schedule: rlk_kernels.Schedule | None = None,
) -> Tensor:  # fmt: skip
    """The same bits over a paged cache[blocks, P, Hk, D], written to `out`; schedule: what the
    layers of a pass share."""
    return rlk_kernels.paged_attention(
        q, k_cache, v_cache, table, lengths,
        cu_seqlens_q=cu_q, scale=float32(scale), window=window, out=out, schedule=schedule,
    )  # fmt: skip


def float32(scale: float) -> float:
    """`scale`, rounded to fp32: engines compute D**-0.5 and 1/sqrt(D), which are two doubles for
    some D."""
    return struct.unpack("f", struct.pack("f", scale))[0]


def act(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, rounded once."""
    return rlk_kernels.swiglu(gate, up)


def logp(
    logits: Tensor, target: Tensor, temperature: float = 1.0, group: ProcessGroup | None = None
) -> Tensor:
    """log softmax(logits / temperature)[target] of each row, fp32 [T]. With `group`, whose ranks
    share the vocabulary, logits are this rank's columns. Raises NotServed for a temperature that is
    not above 0."""
    if not temperature > 0:
        raise NotServed(f"a log-prob at temperature={temperature} is not served; it must be > 0")
    if temperature != 1.0:
        # By a tensor that lies with them: GPUs multiply by the reciprocal of a number.
        logits = logits.float() / torch.full((), temperature, device=logits.device)
    return logp_parallel(logits, target, group)


ROWS = 1024
"""Rows whose logits `logp_of_hidden` has in memory at another temperature than 1; no row's bits
depend on it."""


def logp_of_hidden(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *,
    temperature: float = 1.0, entropy: bool = False, group: ProcessGroup | None = None,
    vocabulary: int | None = None,
) -> Tensor:  # fmt: skip
    """fp32 [T, 1]: `logp(logits(hidden, weight, bias), target, temperature)` of hidden[T, H], bit
    for bit, without the logits of all rows in memory; with `entropy` [T, 2], each row's entropy
    second. Both are differentiable. A negative target has log-prob 0 and gives no gradient.

    `vocabulary`: how many rows of the weight are tokens, where the last ones pad it. With `group`,
    whose ranks share the vocabulary, weight and bias are this rank's rows. Raises NotServed for a
    temperature that is not above 0, and with `group` for one that is not 1.
    """
    if group is not None and group.size() > 1:
        if temperature != 1.0:
            raise NotServed(
                f"log-probs from hidden states at temperature={temperature} are not served where "
                "ranks share the vocabulary; use token_logprobs of the logits"
            )
        found = linear_logp_parallel(
            hidden, weight, target, group, bias=bias, vocabulary=vocabulary, return_entropy=entropy
        )
    else:
        weight, bias = weight[:vocabulary], None if bias is None else bias[:vocabulary]
        if temperature != 1.0:
            return _at_temperature(hidden, weight, bias, target, temperature, entropy)
        found = rlk_kernels.linear_logp(hidden, weight, target, bias=bias, return_entropy=entropy)
    return torch.stack(found, -1) if isinstance(found, tuple) else found[:, None]


def _at_temperature(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, temperature: float,
    entropy: bool,
) -> Tensor:  # fmt: skip
    """`logp_of_hidden`, ROWS at a time: logits are divided, where `linear_logp` would multiply by
    the reciprocal, as it does for the entropy. The backward makes them again."""

    def block(h: Tensor, some: Tensor) -> Tensor:
        return logp(logits(h, weight, bias), some, temperature)

    logprobs = torch.cat([
        checkpoint(block, *rows, use_reentrant=False, preserve_rng_state=False)
        for rows in zip(hidden.split(ROWS), target.split(ROWS), strict=True)
    ])  # fmt: skip
    if not entropy:
        return logprobs[:, None]
    _, entropies = rlk_kernels.linear_logp(
        hidden, weight, target, bias=bias, temperature=temperature, return_entropy=True
    )
    return torch.stack([logprobs, entropies], -1)


def logp_and_more(logits: Tensor, target: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """`logp` of target[T] as [T, 1], and of ids[T, K] as [T, K], in one reading of the logits."""
    logprob, id_logprobs = rlk_kernels.logp(logits, target, token_ids=ids)
    return logprob[:, None], id_logprobs


def packed(lengths: Tensor) -> Tensor:
    """int32 [B + 1]: where each of B sequences of these lengths begins, and where the last ends."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
