"""The operators of a decoder as every engine calls them, with one order of operations and one set
of roundings for all engines. PROFILE.md describes them, and a test covers each of its lines.

Engines differ only in the layout and the batching of their rows. Each function here computes the
same bits for a row, whatever the other rows are.
T = rows (all leading dimensions)   H = heads   D = head size   R = rotated pairs   V = vocabulary
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

import rlk_kernels
from rlk_kernels.errors import UnsupportedShape
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.finish import FINISHED, Finish
from rlk_kernels.parallel.context import context_attention
from rlk_kernels.parallel.latent_attention import latent_attention_by_heads
from rlk_kernels.parallel.linear_logp import linear_logp_parallel
from rlk_kernels.parallel.logp import logp_parallel
from rlk_kernels.parallel.rms_norm import Shared, rms_norm_parallel


def embed(ids: Tensor, weight: Tensor) -> Tensor:
    """[..., F]: rows of weight[V, F], copied."""
    return rlk_kernels.embedding(ids, weight)


def norm(x: Tensor, weight: Tensor, eps: float, one_plus: bool = False) -> Tensor:
    """RMS norm over the last dimension, in fp32, rounded once; with `one_plus` it multiplies by
    1 + weight, in fp32."""
    _check_norm(x, weight)
    return rlk_kernels.rms_norm(x, weight, eps, cast="vllm", one_plus=one_plus)


def shared_norm(
    x: Tensor, weight: Tensor, eps: float, shared: Shared, group: ProcessGroup | None
) -> Tensor:
    """`norm` of rows that are divided among the ranks of a group, by `parallel.rms_norm`."""
    _check_norm(x, weight)
    return rms_norm_parallel(x, weight, eps, shared, group, cast="vllm")


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, one_plus: bool = False
) -> tuple[Tensor, Tensor]:
    """(the norm of the sum, the sum). The sum is rounded to x's dtype before the norm reads it."""
    _check_norm(x, weight)
    return rlk_kernels.rms_norm(x, weight, eps, residual=residual, cast="vllm", one_plus=one_plus)


def _check_norm(x: Tensor, weight: Tensor) -> None:
    """Raises NotSupported if the weight's dtype is not that of the rows, as it is in all
    engines."""
    if x.dtype != weight.dtype:
        raise NotSupported(
            f"a norm's weight in {weight.dtype} is not supported for rows in {x.dtype}"
        )


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm over the last dimension, in fp32, rounded once."""
    _check_norm(x, weight)
    return rlk_kernels.layer_norm(x, weight, eps, bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight^T + bias, rounded once: the bias is added to the fp32 sum."""
    return rlk_kernels.linear(x, weight, bias)


def add_lora(
    base: Tensor, x: Tensor, a: Tensor, b: Tensor, scales: Tensor, slots: Tensor | None = None,
    widths: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """[..., N]: base[..., N], the rounded output of `linear`, plus the update of an adapter for
    x[..., K], by `rlk_kernels.add_lora`: each row of the adapter slots[...] in A[S, R, K],
    B[S, N, R] and scales[S], or without slots of the only one. With `widths`, base is of so many
    projections side by side, A[P, S, R, K] and scales[P, S]."""
    return rlk_kernels.add_lora(x, base, a, b, scales, slots, widths=widths)


def lora_a(x: Tensor, a: Tensor, scales: Tensor) -> Tensor:
    """[..., R]: the first part of `add_lora`, for one adapter, A[R, K]."""
    return rlk_kernels.lora_shrink(x, a[None], scales)


def lora_b(base: Tensor, h: Tensor, b: Tensor, scales: Tensor) -> Tensor:
    """[..., N]: the second part of `add_lora`, for one adapter, B[N, R]."""
    return rlk_kernels.lora_expand(h, base, b[None], scales)


def add_shared(routed: Tensor, shared: Tensor) -> Tensor:
    """The rounded sum of a token's rows plus the row of its shared experts; this sum is computed in
    fp32 and rounded."""
    return routed + shared


def gate_shared(x: Tensor, row: Tensor) -> Tensor:
    """[T, H]: row[T, H] of shared experts times the sigmoid of their gate's logits, fp32 x[T, 1].
    The sigmoid and the product are fp32; the product is rounded."""
    # One expert that every token goes to, weighed by the sigmoid of its logit.
    none = x.new_zeros(1)
    weights, ids = route_corrected(x, 1, False, Correction(none, 1, 1, 1.0))
    return combine(row[:, None], weights, ids, 1)


def logits(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, finish: Finish = FINISHED
) -> Tensor:
    """x @ weight^T + bias in fp32: the accumulator itself, not rounded to the model's dtype; then
    each step of `finish`, in fp32."""
    z = rlk_kernels.linear(x, weight, bias, out_dtype=torch.float32)
    if finish.cap is not None:
        z = rlk_kernels.softcap(z, finish.cap)
    return z if finish.scale == 1.0 else z * finish.scale


def router(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The logits of all experts, fp32 [T, E], for x[T, H]: the accumulator itself, as in
    `logits`. x is widened where the weight is fp32."""
    return rlk_kernels.linear(x.to(weight.dtype), weight, bias, out_dtype=torch.float32)


def route(logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """(weights fp32 [T, k], ids int32 [T, k]): the experts with the k largest logits, in ascending
    id; ties go to the lowest id. The weights are the softmax over these experts (normalize), or
    over all experts."""
    return rlk_kernels.route(logits, k, normalize=normalize)


class Correction(NamedTuple):
    """The settings of routers that correct the scores by which they choose experts. A softmax has
    no groups and no scale, and its weights always add up to 1."""

    bias: Tensor
    """fp32 [E]: added to the scores for the choice, and not for the weights."""
    groups: int
    top_groups: int
    scale: float
    softmax: bool = False
    """Whether the scores are the softmax over all experts, and not sigmoids."""


def scores_of(logits: Tensor, correction: Correction | None) -> Tensor:
    """fp32 [T, E]: the scores by which a router chooses the experts of logits[T, E]."""
    if correction is None:
        return logits
    if correction.softmax:
        return route(logits, logits.shape[1], False)[0] + correction.bias
    return logits.sigmoid() + correction.bias


def route_corrected(
    logits: Tensor, k: int, normalize: bool, correction: Correction
) -> tuple[Tensor, Tensor]:
    """(weights fp32 [T, k], ids int32 [T, k]): the experts with the k largest corrected scores in
    the best groups, in ascending id; ties go to the lowest id. The weights are the scores without
    the correction, divided by their sum (normalize) and scaled."""
    if correction.softmax:
        _, ids = route(scores_of(logits.detach(), correction), k, True)
        return weights_of(logits, ids, True, correction), ids
    bias, groups, top_groups, scale, _ = correction
    return rlk_kernels.route_corrected(
        logits, bias, k, normalize=normalize, groups=groups, top_groups=top_groups, scale=scale
    )


def weights_of(
    logits: Tensor, ids: Tensor, normalize: bool, correction: Correction | None = None
) -> Tensor:
    """fp32 [T, k]: the weights of the experts ids[T, k], in ascending id, by `route`, or with a
    correction by `route_corrected`, whichever router has chosen them."""
    by_softmax = correction is None or correction.softmax
    if by_softmax and not normalize:
        every, _ = route(logits, logits.shape[1], normalize)
        return every.gather(1, ids.long())
    # In both cases the weights depend on the logits of the chosen experts alone.
    chosen, k = logits.gather(1, ids.long()), ids.shape[1]
    if correction is None or correction.softmax:
        return route(chosen, k, normalize)[0]
    none = correction.bias.new_zeros(k)
    return route_corrected(chosen, k, normalize, Correction(none, 1, 1, correction.scale))[0]


def expert_groups(ids: Tensor, experts: int) -> rlk_kernels.ExpertGroups:
    """The rows of each expert, which the products of a layer share."""
    return rlk_kernels.group_by_expert(ids, experts)


def expert_linear(
    x: Tensor, weight: Tensor, groups: rlk_kernels.ExpertGroups, bias: Tensor | None = None
) -> Tensor:
    """[T, k, N] of x[T, K] or x[T, k, K], weight[E, N, K] and bias[E, N]. Each row has the bits of
    `linear`."""
    return rlk_kernels.grouped_linear(x, weight, groups, bias)


def expert_act(x: Tensor, weight: Tensor, groups: rlk_kernels.ExpertGroups) -> Tensor:
    """[T, k, I]: `act` of the two halves of `expert_linear` by weight[E, 2 I, K], with the same
    bits, in one kernel and without gradients."""
    return rlk_kernels.grouped_swiglu(x, weight, groups)


def combine(rows: Tensor, weights: Tensor, ids: Tensor, experts: int) -> Tensor:
    """[T, H]: rows[T, k, H] times weights[T, k], added up in fp32 in ascending id and rounded once.
    Each product is rounded before it is added."""
    return rlk_kernels.combine_experts(rows, weights, ids, experts)


def rope(
    q: Tensor, k: Tensor, positions: Tensor, inv_freq: Tensor, scaling: Tensor | None = None,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q[T, H, D] and k[T, Hk, D], rotated by positions[T] in fp32 and rounded once; pairs consist
    of the two halves of a head, or are neighbours (interleaved). cos and sin are multiplied by
    scaling and rounded to the model's dtype. inv_freq and scaling come from `rotary.rotation`."""
    return rlk_kernels.rope(
        q, k, positions, inv_freq=inv_freq, scaling=scaling, cos_sin_dtype=q.dtype,
        interleaved=interleaved,
    )  # fmt: skip


def temperature_of(rope: Mapping[str, Any]) -> tuple[float, int]:
    """(beta, context) of `query_scale`, by config.json's `rope_parameters`. Raises NotSupported if
    they do not state both."""
    beta, context = (
        rope.get(key) for key in ("llama_4_scaling_beta", "original_max_position_embeddings")
    )
    if beta is None or context is None or context != int(context):
        raise NotSupported(
            f"llama_4_scaling_beta={beta} with original_max_position_embeddings={context} is not "
            "supported: a number and a whole number are needed"
        )
    return float(beta), int(context)


def query_scale(positions: Tensor, beta: float, context: int, dtype: torch.dtype) -> Tensor:
    """The factor of a query at each of positions[...], 1 + beta log(1 + floor(p / context)),
    rounded to the model's dtype. The product with the query is rounded too."""
    return rlk_kernels.position_scale(positions, beta=beta, context=context).to(dtype)


def attention(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float,
    window: int | None = None, group: ProcessGroup | None = None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention of packed sequences: q[T, H, D], k and v[S, Hk, D]. softcap: the cap of the
    scores, in fp32. sinks[H]: a logit without a value for each head, which is read in fp32. If the
    sequences are divided among the ranks of `group`, q, k and v are this rank's rows, cu_q has the
    bounds of whole sequences, and there are no sinks."""
    scale = float32(scale)
    if group is not None:
        return context_attention(q, k, v, cu_q, group, scale=scale, window=window, softcap=softcap)
    return rlk_kernels.attention(
        q,
        k,
        v,
        cu_q,
        cu_k,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=None if sinks is None else sinks.float(),
    )


class Absorbed(NamedTuple):
    """The two factors of the weight that expands latents to keys and values, by head.
    H = heads, L = features of a latent, N, E = features of a head of k without a rotation, of v."""

    keys: Tensor
    """[H, L, N]."""
    values: Tensor
    """[H, E, L]."""


def absorbed(weight: Tensor, heads: int, width: int) -> Absorbed:
    """Views of the weight [H * (N + E), L] that expands latents; width: N."""
    by_head = weight.unflatten(0, (heads, -1))
    return Absorbed(by_head[:, :width].mT, by_head[:, width:])


def latent_queries(q: Tensor, rotated: Tensor, weight: Absorbed) -> Tensor:
    """[T, H, L + R]: q[T, H, N] times the weight of keys, rounded, then rotated[T, H, R]."""
    return rlk_kernels.head_linear(q, weight.keys, rotated)


def latent_attention(
    q: Tensor, latents: Tensor, weight: Absorbed, cu_q: Tensor, cu_k: Tensor, scale: float,
    group: ProcessGroup | None = None,
) -> Tensor:  # fmt: skip
    """[T, H, E]: causal attention of packed sequences, for q[T, H, L + R] of `latent_queries` and
    latents[S, L + R], the normed latent and the rotated key of each token. Its output over latents
    is rounded, and so is the product with the weight of values. If the ranks of `group` share the
    heads, latents are whole on each."""
    out = latent_attention_by_heads(
        q, latents, cu_q, cu_k, group, latent=weight.values.shape[2], scale=float32(scale)
    )
    return rlk_kernels.head_linear(out, weight.values)


def paged_latent_attention(
    q: Tensor, cache: Tensor, weight: Absorbed, table: Tensor, lengths: Tensor, cu_q: Tensor,
    scale: float,
) -> Tensor:  # fmt: skip
    """`latent_attention` over a paged cache[blocks, P, L + R], with the same bits."""
    out = rlk_kernels.paged_latent_attention(
        q, cache, table, lengths, cu_seqlens_q=cu_q, latent=weight.values.shape[2],
        scale=float32(scale),
    )  # fmt: skip
    return rlk_kernels.head_linear(out, weight.values)


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lengths: Tensor, cu_q: Tensor,
    scale: float, window: int | None, out: Tensor, schedule: rlk_kernels.Schedule | None = None,
    softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`attention` over a paged cache[blocks, P, Hk, D], with the same bits, written to `out`.
    schedule: shared by the layers of a pass."""
    return rlk_kernels.paged_attention(
        q, k_cache, v_cache, table, lengths,
        cu_seqlens_q=cu_q, scale=float32(scale), window=window, out=out, schedule=schedule,
        softcap=softcap, sinks=sinks,
    )  # fmt: skip


def float32(scale: float) -> float:
    """`scale`, rounded to fp32, because engines compute D**-0.5 or 1/sqrt(D), which are different
    doubles for some D."""
    return struct.unpack("f", struct.pack("f", scale))[0]


def act(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """activation(gate) * up, rounded once: silu, or gelu_tanh, gelu's tanh form."""
    return rlk_kernels.swiglu(gate, up, activation=activation)


def act_alone(x: Tensor, activation: str) -> Tensor:
    """activation(x), rounded once: relu2, the square of what is above 0, or gelu_tanh."""
    return rlk_kernels.activation(x, activation)


def clamped_act(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """g / (1 + exp(-alpha g)) * (u + 1), rounded once, where g is the gate, at most the limit, and
    u is up, between -limit and the limit."""
    return rlk_kernels.clamped_swiglu(gate, up, alpha=alpha, limit=limit)


def gate(x: Tensor, gate: Tensor) -> Tensor:
    """x times the sigmoid of a gate of its shape, in fp32, rounded once."""
    return rlk_kernels.swiglu(gate, x, activation="sigmoid")


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`norm` times silu(gate) in fp32, rounded once."""
    _check_norm(x, weight)
    return rlk_kernels.gated_rms_norm(x, gate, weight, eps)


class DeltaNet(NamedTuple):
    """The parameters of a gated delta net, and its sizes. F = features of q, k and v of all heads,
    Hk, Hv = heads, D = features of a head of q and k."""

    conv: Tensor
    """[F, taps]."""
    a_log: Tensor
    """[Hv]; rounded to the dtype of the rows, as engines that cast the whole model have it."""
    dt_bias: Tensor
    """[Hv]; likewise."""
    key_heads: int
    value_heads: int
    key_dim: int


class Kept(NamedTuple):
    """What sequences keep between calls, by slot, for `short_conv` and `delta_rule`."""

    conv: Tensor
    """[slots, taps - 1, F]."""
    chunks: tuple[Tensor, Tensor, Tensor, Tensor]
    """state, keys, updates and decays of `rlk_kernels.cached_gated_delta_rule`."""
    slots: Tensor
    """int32 [sequences]."""
    context: Tensor
    """int32 [sequences]: the tokens before the new rows."""


DELTA_CHUNK = 64
"""The rows of an open chunk that `Kept` holds. The operator checks it."""
L2_EPS = 1e-6
"""What is added to the sum of squares of a head of q or k."""


def delta_gates(net: DeltaNet, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(g, the logarithm of the decay, fp32, and beta) [T, Hv] of a and b[T, Hv]."""
    parameters = (x.to(a.dtype) for x in (net.a_log, net.dt_bias))
    return rlk_kernels.delta_gates(a, b, *parameters)


def short_conv(net: DeltaNet, mixed: Tensor, cu: Tensor, kept: Kept | None = None) -> Tensor:
    """[T, F]: the convolution of packed sequences, mixed[T, F]. `kept`: rows continue sequences,
    without a gradient."""
    if kept is None:
        return rlk_kernels.causal_conv1d(mixed, net.conv, cu)
    return rlk_kernels.cached_causal_conv1d(
        mixed, net.conv, kept.conv, kept.slots, kept.context, cu
    )


def delta_rule(
    net: DeltaNet, convolved: Tensor, g: Tensor, beta: Tensor, cu: Tensor,
    kept: Kept | None = None,
) -> Tensor:  # fmt: skip
    """[T, Hv, E]: what packed sequences read of their state, for convolved[T, F], g and
    beta[T, Hv]. `kept`: as in `short_conv`."""
    keys = net.key_heads * net.key_dim
    q, k, v = convolved.split([keys, keys, convolved.shape[1] - 2 * keys], -1)
    q, k = (x.unflatten(-1, (net.key_heads, net.key_dim)) for x in (q, k))
    rows = q, k, v.unflatten(-1, (net.value_heads, -1)), g, beta
    scale = float32(net.key_dim**-0.5)
    if kept is None:
        return rlk_kernels.gated_delta_rule(*rows, cu, scale=scale, eps=L2_EPS)
    return rlk_kernels.cached_gated_delta_rule(
        *rows, *kept.chunks, kept.slots, kept.context, cu, scale=scale, eps=L2_EPS
    )


class Truncation(NamedTuple):
    """The limits of `rlk_kernels.sample`, the same for all rows."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


EVERYTHING = Truncation()
"""All tokens are kept."""


def logp(
    logits: Tensor, target: Tensor, temperature: float = 1.0, group: ProcessGroup | None = None,
    truncation: Truncation = EVERYTHING, kept: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """log softmax(logits / temperature)[target] of each row, fp32 [T], over the tokens that the
    truncation keeps, or over those of `kept` (bool [T, V]; a row without any keeps all); -inf for
    a target that is dropped. If the vocabulary is divided among the ranks of `group`, logits are
    this rank's columns. Raises NotSupported for a temperature that is not above 0, and for a
    truncation or `kept` with `group`; UnsupportedShape for `kept` of another shape."""
    if not temperature > 0:
        raise NotSupported(
            f"a log-prob at temperature={temperature} is not supported; it must be > 0"
        )
    dropped = None
    truncated = truncation != EVERYTHING
    if (truncated or kept is not None) and group is not None and group.size() > 1:
        raise NotSupported("a truncation is not supported if ranks share the vocabulary")
    if kept is not None:
        if kept.shape != logits.shape:
            raise UnsupportedShape(
                f"kept tokens {tuple(kept.shape)} do not fit logits {tuple(logits.shape)}"
            )
        kept = kept.to(logits.device)
        dropped = ~kept & kept.any(-1, keepdim=True)
    elif truncated:
        limits = truncation._asdict()
        dropped = ~rlk_kernels.kept_tokens(logits.detach(), temperature=temperature, **limits)
    if temperature != 1.0:
        # A tensor on the same device, because GPUs multiply by the reciprocal of a Python number.
        logits = logits.float() / torch.full((), temperature, device=logits.device)
    if dropped is not None:
        logits = logits.masked_fill(dropped, -torch.inf)
    return logp_parallel(logits, target, group)


ROWS = 1024
"""The number of rows whose logits `logp_of_hidden` has in memory at a temperature other than 1, or
with a truncation. No bit depends on it."""


def logp_of_hidden(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *,
    temperature: float = 1.0, entropy: bool = False, group: ProcessGroup | None = None,
    vocabulary: int | None = None, entropy_gradient: bool = True, finish: Finish = FINISHED,
    truncation: Truncation = EVERYTHING, kept: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """fp32 [T, 1]: `logp(logits(hidden, weight, bias, finish), target, temperature, None,
    truncation, kept)` of hidden[T, H], bit for bit, without the logits of all rows in memory; with
    `entropy` [T, 2], where the second column is each row's entropy. Both are differentiable. A
    negative target has log-prob 0 and no gradient. Without `entropy_gradient`, a temperature other
    than 1 saves the entropies' backward.

    vocabulary: the number of the weight's rows that are tokens; the last rows are padding. If the
    vocabulary is divided among the ranks of `group`, weight and bias are this rank's rows. Raises
    NotSupported for a temperature that is not above 0, with `group` for one that is not 1, and for
    a truncation or kept tokens with `group` or `entropy`.
    """
    truncated = truncation != EVERYTHING or kept is not None
    if truncated and entropy:
        raise NotSupported("the entropy of truncated distributions")
    if group is not None and group.size() > 1:
        if temperature != 1.0 or truncated:
            raise NotSupported(
                f"log-probs from hidden states at temperature={temperature}, truncated or not, are "
                "not supported if ranks share the vocabulary; use token_logprobs of the logits"
            )
        scores = linear_logp_parallel(
            hidden, weight, target, group, bias=bias, vocabulary=vocabulary, return_entropy=entropy
        )
    else:
        weight, bias = weight[:vocabulary], None if bias is None else bias[:vocabulary]
        if temperature != 1.0 or truncated:
            return _at_temperature(
                hidden, weight, bias, target, temperature, entropy, entropy_gradient, finish,
                truncation, kept,
            )  # fmt: skip
        scores = rlk_kernels.linear_logp(
            hidden, weight, target, bias=bias, return_entropy=entropy, softcap=finish.cap,
            logit_scale=finish.scale,
        )  # fmt: skip
    return torch.stack(scores, -1) if isinstance(scores, tuple) else scores[:, None]


def _at_temperature(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, temperature: float,
    entropy: bool, entropy_gradient: bool, finish: Finish, truncation: Truncation,
    kept: Tensor | None,
) -> Tensor:  # fmt: skip
    """`logp_of_hidden`, ROWS at a time, with divided logits; `linear_logp` would multiply them by
    the reciprocal, as it does for the entropy. The backward computes the logits again."""

    def block(h: Tensor, some: Tensor, kept: Tensor | None) -> Tensor:
        return logp(logits(h, weight, bias, finish), some, temperature, None, truncation, kept)

    parts = hidden.split(ROWS), target.split(ROWS)
    given = [None] * len(parts[0]) if kept is None else kept.split(ROWS)
    logprobs = torch.cat([
        checkpoint(block, *rows, use_reentrant=False, preserve_rng_state=False)
        for rows in zip(*parts, given, strict=True)
    ])  # fmt: skip
    if not entropy:
        return logprobs[:, None]
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
        _, entropies = rlk_kernels.linear_logp(
            hidden, weight, target, bias=bias, temperature=temperature, return_entropy=True,
            softcap=finish.cap, logit_scale=finish.scale,
        )  # fmt: skip
    return torch.stack([logprobs, entropies], -1)


def logp_and_more(logits: Tensor, target: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(`logp` of target[T] as [T, 1], of ids[T, K] as [T, K]). The logits are read once."""
    logprob, id_logprobs = rlk_kernels.logp(logits, target, token_ids=ids)
    return logprob[:, None], id_logprobs


def packed(lengths: Tensor) -> Tensor:
    """int32 [B + 1]: where each of B sequences of these lengths begins, and where the last one
    ends."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
