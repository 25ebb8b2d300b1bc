"""The settings of a live SGLang model that affect its numbers."""

from typing import Any

import torch

from rlk_align.engines.common.attributes import (
    gated_activation_name,
    norm_attributes,
    norm_epsilons,
    per_layer,
)
from rlk_align.engines.sglang.experts import sparse_blocks
from rlk_align.engines.sglang.places import sglang_places
from rlk_align.model.shape import ModelShape


def sglang_attributes(model: Any, shape: ModelShape) -> dict[str, Any]:
    """By the names of `compare.parity`, as `hf_attributes` has them."""
    layers, config = list(model.model.layers), model.config
    attention = [layer.self_attn for layer in layers]
    rotary, routers = attention[0].rotary_emb, [b.topk for b in sparse_blocks(model).values()]
    dtype = next(p.dtype for p in model.parameters())
    return {
        "layers": len(layers),
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        **per_layer("heads", [a.total_num_heads for a in attention]),
        **per_layer("kv_heads", [a.total_num_kv_heads for a in attention]),
        **per_layer("head_dim", [a.head_dim for a in attention]),
        **per_layer("attention_scale", [float(f"{a.attn.scaling:.6g}") for a in attention]),
        **per_layer("sliding_window", [_window(a.attn) for a in attention]),
        "rope_type": config.rope_parameters["rope_type"],
        "rope_theta": float(f"{rotary.base:.5g}"),
        "rope_dim": rotary.rotary_dim,
        **norm_attributes(norm_epsilons(model, sglang_places(model, shape, 1))),
        **per_layer("activation", [_activation(layer.mlp, dtype) for layer in layers]),
        **per_layer("experts_per_token", [r.topk_config.top_k for r in routers]),
        **per_layer("norm_topk_prob", [bool(r.topk_config.renormalize) for r in routers]),
        "tie_word_embeddings": model.lm_head is model.model.embed_tokens,
        "padding_side": None,
    }


def _window(attention: Any) -> int | None:
    """The number of tokens that a query attends to; SGLang counts those before it."""
    window = attention.sliding_window_size
    return None if window in (None, -1) else int(window) + 1


def _activation(mlp: Any, dtype: torch.dtype) -> str:
    """The name of an MLP's activation; for experts SGLang has only the name itself."""
    if hasattr(mlp, "experts"):
        return mlp.experts.moe_runner_config.activation
    return gated_activation_name(mlp, dtype)
