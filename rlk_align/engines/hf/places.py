"""Where the canonical operators are in an HF decoder."""

from collections.abc import Iterator
from typing import Any

from rlk_align.engines.common.experts import INSIDE
from rlk_align.engines.common.places import Place
from rlk_align.model.operators import layer_modules

INPUT_SITES = {
    "attn": "self_attn.o_proj",
    "attn_residual": "post_attention_layernorm",
    "act": "mlp.down_proj",
    "shared_act": "mlp.shared_experts.down_proj",
}
"""Operators without a module of their own -> the module whose input is that site."""


def hf_places(model: Any) -> Iterator[Place]:
    """The place of each site in a live model."""
    yield Place(sites=("embed",), module="model.embed_tokens")
    for i, layer in enumerate(model.model.layers):
        here, attention = f"model.layers.{i}", f"model.layers.{i}.self_attn"
        modules = dict(layer.named_modules())
        for op, path in layer_modules().items():
            if path in modules:
                yield Place(sites=(f"layers.{i}.{op}",), module=f"{here}.{path}")
        for op in ("q_rope", "k_rope"):
            yield Place(sites=(f"layers.{i}.{op}",), module=attention, end="rope")
        sparse = hasattr(layer.mlp, "experts")
        for op in INSIDE if sparse else ():
            yield Place(sites=(f"layers.{i}.{op}",), module=f"{here}.mlp.experts", end="inside")
        if sparse:
            yield Place(sites=(f"layers.{i}.moe_out",), module=f"{here}.mlp")
        for op, path in INPUT_SITES.items():
            if path not in modules:
                continue
            yield Place(sites=(f"layers.{i}.{op}",), module=f"{here}.{path}", end="input")
        yield Place(sites=(f"layers.{i}.mlp_residual",), module=here)
    yield Place(sites=("final_norm",), module="model.norm")
    yield Place(sites=("logits",), module="lm_head", rows="sampled")
