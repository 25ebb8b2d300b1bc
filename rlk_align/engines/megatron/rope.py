"""The settings of megatron-core for a checkpoint's rotary embedding, without importing it.

The kinds are those that a Megatron trainer can select, with the numbers of the checkpoint:
`seq_len_interpolation_factor` for linear, which divides the positions, while HF divides the
frequencies; `rope_scaling` for llama3; and `position_embedding_type="yarn"`, whose ramp and
attention factor are HF's formulas. megatron-core does not support dynamic and longrope, which
depend on the length of the sequence.
"""

import math
import struct
from typing import Any

from rlk_align.model.rotary import lacks_factor

ROPES = ("default", "linear", "llama3", "yarn")
"""The supported values of `rope_type`."""


def rope_arguments(rope: dict[str, Any], latent: bool = False) -> dict[str, Any]:
    """The arguments of GPTModel for these `rope_parameters`. `latent`: whether each attention has a
    rotary embedding of its own, by the config, and GPTModel has none."""
    if latent:
        return {"position_embedding_type": "rope"}
    kind = rope["rope_type"]
    return {
        "position_embedding_type": "yarn" if kind == "yarn" else "rope",
        "rotary_base": rope["rope_theta"],
        "rope_scaling": kind == "llama3",
        "seq_len_interpolation_factor": rope["factor"] if kind == "linear" else None,
    }


def yarn_settings(rope: dict[str, Any]) -> dict[str, Any]:
    """The attributes for yarn that GPTModel and the attention read from TransformerConfig, which
    has no fields for them; empty for other kinds."""
    if rope["rope_type"] != "yarn":
        return {}
    # As in HF, one of the two alone has no effect.
    scales = (rope.get("mscale"), rope.get("mscale_all_dim"))
    mscale, mscale_all_dim = scales if all(scales) else (None, None)
    return {
        "yarn_rotary_scaling_factor": rope["factor"],
        "yarn_original_max_position_embeddings": rope["original_max_position_embeddings"],
        "yarn_beta_fast": rope.get("beta_fast") or 32.0,
        "yarn_beta_slow": rope.get("beta_slow") or 1.0,
        "yarn_mscale": mscale,
        "yarn_mscale_all_dim": mscale_all_dim,
        "yarn_correction_range_round_to_int": rope.get("truncate", True),
    }


def another_attention_factor(rope: dict[str, Any]) -> bool:
    """Whether the checkpoint states an `attention_factor` for yarn that differs from the one that
    megatron-core computes."""
    stated = rope.get("attention_factor")
    if rope["rope_type"] != "yarn" or stated is None or lacks_factor(rope):
        return False
    settings = yarn_settings({"original_max_position_embeddings": None} | rope)
    factor = settings["yarn_rotary_scaling_factor"]

    def scale(by: float) -> float:
        return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0

    both = settings["yarn_mscale"], settings["yarn_mscale_all_dim"]
    computed = scale(1.0) if None in both else scale(both[0]) / scale(both[1])
    # The factor multiplies cos and sin in float32.
    return struct.pack("f", stated) != struct.pack("f", computed)


def refused_with_latents(rope: dict[str, Any]) -> dict[str, bool]:
    """What a checkpoint's `rope_parameters` may ask for -> whether they ask for it, and
    megatron-core's latent attention has no setting for it."""
    kind, of_all = rope["rope_type"], rope.get("mscale_all_dim")
    yarn = kind == "yarn"
    return {
        f"rope_type={kind} with latent attention": kind not in ("default", "yarn"),
        # It computes the factor of rotated vectors from both.
        f"mscale_all_dim={of_all} without mscale": yarn and bool(of_all) and not rope.get("mscale"),
        "truncate=false with latent attention": yarn and not rope.get("truncate", True),
    }


def rotaries(model: Any) -> list[Any]:
    """The rotary embeddings of a model: one for all layers, or one of each latent attention."""
    if not model.config.multi_latent_attention:
        return [model.rotary_pos_emb]
    return [layer.self_attention.rotary_pos_emb for layer in model.decoder.layers]
