"""The settings of a live GPTModel that affect its numbers, by the names of `hf_attributes`."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from rlk_align.engines.common.attributes import (
    activation_name,
    active_dropout,
    norm_attributes,
    norm_epsilons,
    per_layer,
    rope_theta,
)
from rlk_align.engines.common.places import Place
from rlk_align.engines.megatron.experts import routing
from rlk_align.engines.megatron.layout import padded_vocab
from rlk_align.engines.megatron.rope import rotaries
from rlk_align.model.shape import ModelShape


def stage_facts(
    model: Any,
    places: Iterable[Place],
    shape: ModelShape,
    tp: int,
    rope: dict[str, Any],
    built: torch.Tensor,
) -> dict[str, Any]:
    """The settings of one pipeline stage, read from the live modules, so that they include what a
    patch changed.

    `places`: those of the stage's sites; `rope`: the checkpoint's `rope_parameters`; `built`: the
    `rotation` of the model before it was patched.
    """
    layers = list(model.decoder.layers)
    attention = [layer.self_attention for layer in layers]
    heads = [_heads(a, tp) for a in attention]
    dtype = next(model.parameters()).dtype
    facts: dict[str, Any] = {
        "layers": {
            "heads": [q for q, _ in heads],
            "kv_heads": [kv for _, kv in heads],
            "head_dim": [_rotated_width(a) for a in attention],
            "attention_scale": [_scale(a) for a in attention],
            "sliding_window": [getattr(a.core_attention, "window", None) for a in attention],
            "activation": [_activation(layer.mlp, dtype) for layer in layers],
            **routing(model),
        },
        "norms": norm_epsilons(model, places),
        "dropout": active_dropout(model),
        "rope": {
            "rope_type": _rope_type(model),
            "rope_theta": _theta(model, rope, built),
            "rope_dim": 2 * rotaries(model)[0].inv_freq.numel(),
        },
    }
    if model.pre_process:
        embedding = model.embedding.word_embeddings.weight
        padding = padded_vocab(shape.vocab, tp) - shape.vocab
        facts["hidden_size"] = embedding.shape[1]
        facts["vocab_size"] = embedding.shape[0] * tp - padding
    if model.post_process:
        # The last of several stages has a copy of the embedding.
        copied = not model.pre_process and model.share_embeddings_and_output_weights
        facts["tied"] = copied or model.output_layer.weight is None
    return facts


def megatron_attributes(stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The attributes of the whole model, from the facts of its stages."""
    names = stages[0]["layers"]
    every = {name: [value for s in stages for value in s["layers"][name]] for name in names}
    epsilons = {site: eps for s in stages for site, eps in s["norms"].items()}
    attributes: dict[str, Any] = {
        "layers": len(every["heads"]),
        "hidden_size": stages[0]["hidden_size"],
        "vocab_size": stages[0]["vocab_size"],
        **stages[0]["rope"],
        **norm_attributes(epsilons),
        "tie_word_embeddings": stages[-1]["tied"],
    }
    for name, values in every.items():
        attributes |= per_layer(name, values)
    attributes |= next((s["dropout"] for s in stages if s["dropout"]), {})
    if any(s["rope"] != stages[0]["rope"] for s in stages):
        attributes["rope_theta"] = math.nan
    return attributes


def _heads(attention: Any, tp: int) -> tuple[int | None, int | None]:
    """The number of heads of q, and of k and v, from the sizes of the live projections."""
    out = getattr(attention.linear_proj, "weight", None)
    if attention.config.multi_latent_attention:
        # Every head has a key of its own, expanded from the latent.
        heads = None if out is None else out.shape[1] * tp // attention.config.v_head_dim
        return heads, heads
    fused = getattr(attention.linear_qkv, "weight", None)
    if out is None or fused is None:
        return None, None
    width = attention.hidden_size_per_attention_head
    q = out.shape[1] * tp // width
    return q, (fused.shape[0] * tp // width - q) // 2


def _rotated_width(attention: Any) -> int:
    """The features of a head, or those of them that a latent attention rotates."""
    if attention.config.multi_latent_attention:
        return int(attention.config.qk_pos_emb_head_dim)
    return int(attention.hidden_size_per_attention_head)


def _scale(attention: Any) -> float | None:
    # TransformerEngine's core keeps the scale in the kernels that it chooses from.
    core = attention.core_attention
    for owner in (
        core,
        *(getattr(core, n, None) for n in ("flash_attention", "unfused_attention")),
    ):
        scale = getattr(owner, "softmax_scale", None)
        if scale is not None:
            return float(f"{scale:.6g}")
    return None


def rotation(model: Any) -> torch.Tensor:
    """The live rotary embedding as numbers, float32 on the CPU: for each pair of features the angle
    from one position to the next, and last the factor of yarn on cos and sin."""
    from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as yarn

    rotary, latent = rotaries(model)[0], model.config.multi_latent_attention
    every = rotary.get_emb(2)
    angles = (every[0] if isinstance(every, tuple) else every)[:, 0, 0].cpu()
    step = (angles[1] - angles[0])[: angles.shape[1] // 2]
    # The kernels keep the factor with the frequencies; megatron-core's attention reads the config.
    from_config = yarn._yarn_get_concentration_factor_from_config(model.config)
    usual = every[1] if latent and isinstance(every, tuple) else from_config
    factor = getattr(rotary, "rlk_scaling", usual)
    return torch.cat([step, torch.tensor([1.0 if factor is None else float(factor)])])


def _rope_type(model: Any) -> str:
    if model.config.multi_latent_attention:
        return "yarn" if model.config.rope_type == "yarn" else "default"
    if model.position_embedding_type == "yarn":
        return "yarn"
    if model.rotary_pos_emb.seq_len_interpolation_factor is not None:
        return "linear"
    return "llama3" if model.rotary_scaling else "default"


def _theta(model: Any, rope: dict[str, Any], built: torch.Tensor) -> float:
    """The base of the rotary embedding. It cannot be computed from scaled frequencies: for those it
    is the checkpoint's, or NaN, which equals nothing, if a patch changed them."""
    live = rotation(model)
    if _rope_type(model) == "default":
        return rope_theta(live[:-1])
    return float(rope["rope_theta"]) if torch.equal(live, built) else math.nan


def _activation(mlp: Any, dtype: torch.dtype) -> str:
    """The name of the activation, which Megatron's gated MLP reads from the config."""
    device = next(mlp.parameters()).device
    return activation_name(lambda x: mlp.config.activation_func(x.to(device)).cpu(), dtype)
