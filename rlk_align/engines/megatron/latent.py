"""Latent attention of megatron-core's GPTModel (MLA): its settings, and where its operators are.

megatron-core expands the latents to keys and values, as transformers does. Its products of latents
are column-parallel, and their outputs are gathered before the norms.
"""

from collections.abc import Iterator
from typing import Any

from rlk_align.engines.common.layout import even, of_outputs
from rlk_align.engines.common.places import FIRST, HALVES, WITH_BIAS, Place
from rlk_align.model.shape import ModelShape


def latent_places(i: int, shape: ModelShape, tp: int, kernels: bool) -> Iterator[Place]:
    """The places in the latent attention of a layer, up to `o_proj`."""
    name, attention = f"layers.{i}", f"decoder.layers.{i}.self_attention"

    def place(module: str, op: str, **more: Any) -> Place:
        site = (f"{name}.{op}",)
        path = f"{attention}.{module}".removesuffix(".")
        return Place(sites=site, module=path, **{"layout": of_outputs(site, shape, tp)} | more)

    def down(module: str, op: str) -> Place:
        """A product whose rows ranks share, whatever they are."""
        size = shape.size(shape.operator_of(f"{name}.{op}").features)
        return place(module, op, layout=even(f"{name}.{op}", size, tp))

    if shape.query_latent:
        yield down("linear_q_down_proj", "q_a")
        yield place("q_layernorm", "q_a_norm")
        yield place("linear_q_up_proj", "q_b")
    else:
        yield place("linear_q_proj", "q_proj")
    yield down("linear_kv_down_proj", "kv_a")
    yield place("kv_layernorm", "kv_a_norm")
    # The kernels leave the features in their order.
    access = FIRST if kernels else HALVES
    yield place("", "q_rope", end="rope", access=access)
    yield place("", "k_rope", end="rope", access=access)
    weight = f"{attention}.linear_kv_up_proj"
    yield place("linear_proj", "latent_attn", end="input", parameters_in=weight)
    yield place("linear_proj", "o_proj", access=WITH_BIAS)


def latent_settings(shape: ModelShape, rope: dict[str, Any]) -> dict[str, Any]:
    """The settings of MLATransformerConfig beside those of TransformerConfig; `rope`: the
    checkpoint's `rope_parameters`."""
    yarn = rope["rope_type"] == "yarn"
    settings = {
        "multi_latent_attention": True,
        "q_lora_rank": shape.query_latent or None,
        "kv_lora_rank": shape.latent,
        "qk_head_dim": shape.unrotated_width,
        "qk_pos_emb_head_dim": shape.head_dim,
        "v_head_dim": shape.value_width,
        "kv_channels": shape.value_width,
        "num_query_groups": shape.heads,
        "rope_type": "yarn" if yarn else "rope",
        "rotary_base": rope["rope_theta"],
        # The scale of the scores has no factor without them.
        "rotary_scaling_factor": 1.0,
        "mscale_all_dim": 0.0,
    }
    if not yarn:
        return settings
    # As in HF, one of the two alone does not change the rotated vectors.
    scales = (rope.get("mscale"), rope.get("mscale_all_dim"))
    mscale, mscale_all_dim = scales if all(scales) else (1.0, 0.0)
    return settings | {
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": rope.get("beta_fast") or 32.0,
        "beta_slow": rope.get("beta_slow") or 1.0,
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
    }
