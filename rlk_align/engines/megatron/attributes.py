"""What decides a live GPTModel's numbers beside its weights, by the names of `hf_attributes`."""

import math
from collections.abc import Iterable
from typing import Any

import torch

from rlk_align.engines.common.attributes import (
    activation_name,
    norm_attributes,
    per_layer,
    rope_theta,
)
from rlk_align.engines.common.places import Place
from rlk_align.engines.megatron.experts import routing
from rlk_align.engines.megatron.layout import padded_vocab
from rlk_align.model.families import ModelShape


def megatron_attributes(
    model: Any,
    places: Iterable[Place],
    shape: ModelShape,
    tp: int,
    rope: dict[str, Any],
    built: torch.Tensor,
) -> dict[str, Any]:
    """Read from the live modules: what a patch changed shows up.

    `rope`: the checkpoint's `rope_parameters`; `built`: the `rotation` made from them.
    """
    layers = list(model.decoder.layers)
    attention = [layer.self_attention for layer in layers]
    embedding = model.embedding.word_embeddings.weight
    padding = padded_vocab(shape.vocab, tp) - shape.vocab
    heads = [_heads(a, tp) for a in attention]
    return {
        "layers": len(layers),
        "hidden_size": embedding.shape[1],
        "vocab_size": embedding.shape[0] * tp - padding,
        **per_layer("heads", [q for q, _ in heads]),
        **per_layer("kv_heads", [kv for _, kv in heads]),
        **per_layer("head_dim", [a.hidden_size_per_attention_head for a in attention]),
        **per_layer("attention_scale", [_scale(a) for a in attention]),
        **per_layer(
            "sliding_window", [getattr(a.core_attention, "window", None) for a in attention]
        ),
        "rope_type": _rope_type(model),
        "rope_theta": _theta(model, rope, built),
        "rope_dim": 2 * model.rotary_pos_emb.inv_freq.numel(),
        **norm_attributes(model, places),
        **per_layer("activation", [_activation(layer.mlp, embedding.dtype) for layer in layers]),
        **per_layer("experts_per_token", [k for k, _ in routing(model)]),
        **per_layer("norm_topk_prob", [norm for _, norm in routing(model)]),
        "tie_word_embeddings": model.output_layer.weight is None,
    }


def _heads(attention: Any, tp: int) -> tuple[int | None, int | None]:
    """Heads of q, and of k and v, by the sizes of the live projections."""
    out = getattr(attention.linear_proj, "weight", None)
    fused = getattr(attention.linear_qkv, "weight", None)
    if out is None or fused is None:
        return None, None
    width = attention.hidden_size_per_attention_head
    q = out.shape[1] * tp // width
    return q, (fused.shape[0] * tp // width - q) // 2


def _scale(attention: Any) -> float | None:
    # TransformerEngine's core leaves it to the kernels that it chooses from.
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
    """What the live rotary embedding does, float32 on the CPU: the angle from one position to the
    next for each pair of features, and last the factor of yarn on cos and sin."""
    from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as yarn

    every = model.rotary_pos_emb.get_emb(2)
    angles = (every[0] if isinstance(every, tuple) else every)[:, 0, 0].cpu()
    step = (angles[1] - angles[0])[: angles.shape[1] // 2]
    # The kernels keep it with the frequencies, megatron-core's attention asks the config.
    from_config = yarn._yarn_get_concentration_factor_from_config(model.config)
    factor = getattr(model.rotary_pos_emb, "rlk_scaling", from_config)
    return torch.cat([step, torch.tensor([1.0 if factor is None else float(factor)])])


def _rope_type(model: Any) -> str:
    if model.position_embedding_type == "yarn":
        return "yarn"
    if model.rotary_pos_emb.seq_len_interpolation_factor is not None:
        return "linear"
    return "llama3" if model.rotary_scaling else "default"


def _theta(model: Any, rope: dict[str, Any], built: torch.Tensor) -> float:
    """Scaled frequencies do not tell their base: it is the checkpoint's as long as they are what
    was built from it, and NaN, which equals nothing, where a patch changed them."""
    live = rotation(model)
    if _rope_type(model) == "default":
        return rope_theta(live[:-1])
    return float(rope["rope_theta"]) if torch.equal(live, built) else math.nan


def _activation(mlp: Any, dtype: torch.dtype) -> str:
    """Megatron's gated MLP takes its activation from the config, not from its attribute."""
    device = next(mlp.parameters()).device
    return activation_name(lambda x: mlp.config.activation_func(x.to(device)).cpu(), dtype)
