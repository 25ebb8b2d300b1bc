"""A small random checkpoint of each family that has variants of its own, with settings that make
every variant matter: windows that are shorter than the prompts, ropes that differ by layer, biases.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from random_model import write_random_model
from safetensors.torch import load_file, save_file

LAYERS = 4
KINDS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
THETA = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0}
YARN |= {"original_max_position_embeddings": 16}
BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
TEMPERATURE = YARN | {"mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1}
SETTINGS: dict[str, dict[str, Any]] = {
    "olmo2": {"head_dim": 32, "attention_bias": True},
    "olmo3": {
        **{"sliding_window": 8, "layer_types": KINDS},
        "rope_parameters": {"sliding_attention": THETA, "full_attention": YARN},
    },
    "seed_oss": {"head_dim": 32, "attention_out_bias": True},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "ministral3": {"head_dim": 32, "rope_parameters": TEMPERATURE},
    "gemma2": {
        **{"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 24},
        # As small as the scores and the logits of a random model, so that they matter.
        **{"attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.0},
        **{"layer_types": KINDS[-2:] * 2, "tie_word_embeddings": True},
    },
    "granite": {
        **{"head_dim": 32, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
        **{"attention_multiplier": 0.4, "logits_scaling": 6.0, "tie_word_embeddings": True},
    },
    "glm4": {"head_dim": 32},
    "glm": {"head_dim": 32},
    "arcee": {"head_dim": 32, "mlp_bias": True, "rope_parameters": YARN},
    "granitemoe": {
        **{"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.4},
        **{"logits_scaling": 6.0, "num_local_experts": 8, "num_experts_per_tok": 3},
        **{"intermediate_size": 96, "tie_word_embeddings": True},
    },
    "granitemoehybrid": {
        **{"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.4},
        **{"logits_scaling": 6.0, "num_local_experts": 8, "num_experts_per_tok": 3},
        **{"intermediate_size": 96, "shared_intermediate_size": 256},
        **{"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_chunk_size": 16},
        **{"layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"]},
        **{"position_embedding_type": "nope", "tie_word_embeddings": True},
    },
    "falcon_h1": {
        **{"mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32},
        **{"mamba_chunk_size": 16, "mamba_norm_before_gate": False, "mamba_n_groups": 2},
        **{"embedding_multiplier": 5.6, "lm_head_multiplier": 0.4, "key_multiplier": 0.7},
        **{"attention_in_multiplier": 1.2, "attention_out_multiplier": 0.9},
        **{"ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.3, "mlp_multipliers": [0.8, 0.6]},
        "ssm_multipliers": [0.7, 0.9, 1.3, 1.1, 0.6],
    },
    "nemotron_h": {
        **{"head_dim": 32, "mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 32},
        **{"n_groups": 2, "chunk_size": 16, "num_hidden_layers": 6, "sliding_window": None},
        "layers_block_type": [
            *("linear_attention", "linear_attention", "full_attention"),
            *("mlp", "linear_attention", "mlp"),
        ],
    },
    "helium": {"head_dim": 32},
    "ernie4_5": {"head_dim": 32, "tie_word_embeddings": True},
    "phi3": {
        **{"sliding_window": 8, "original_max_position_embeddings": 128},
        "rope_parameters": {
            **{"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
            "original_max_position_embeddings": 128,
            "short_factor": [1 + 0.1 * i for i in range(12)],
            "long_factor": [2 + 0.5 * i for i in range(12)],
        },
    },
    "exaone4": {
        **{"head_dim": 32, "sliding_window": 8, "sliding_window_pattern": 4},
        "layer_types": KINDS,
    },
    "starcoder2": {"head_dim": 32, "sliding_window": 8, "tie_word_embeddings": True},
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.5},
    "cohere2": {
        **{"sliding_window": 8, "layer_types": KINDS, "logit_scale": 0.3},
        "tie_word_embeddings": True,
    },
    "hunyuan_v1_dense": {"head_dim": 32},
    "gemma": {"head_dim": 32, "tie_word_embeddings": True},
    "gemma3_text": {
        **{"head_dim": 32, "sliding_window": 8, "layer_types": KINDS, "query_pre_attn_scalar": 24},
        "rope_parameters": {
            "sliding_attention": THETA,
            "full_attention": THETA | {"rope_theta": 1e6},
        },
        **{"tie_word_embeddings": True},
    },
    "gemma4_text": {
        **{"head_dim": 32, "global_head_dim": 64, "attention_k_eq_v": True},
        **{"num_global_key_value_heads": 1, "sliding_window": 8, "layer_types": KINDS},
        **{"hidden_size_per_layer_input": 0, "final_logit_softcapping": 1.0},
        **{"tie_word_embeddings": True},
    },
    "qwen2_moe": {
        **{"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96},
        **{"shared_expert_intermediate_size": 160, "mlp_only_layers": [1]},
    },
    "ernie4_5_moe": {
        **{"head_dim": 32, "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 96},
        **{"moe_num_shared_experts": 2, "moe_layer_start_index": 1, "tie_word_embeddings": True},
    },
    "minimax_m2": {
        **{"head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 3},
        **{"intermediate_size": 96, "rotary_dim": 16},
        # vLLM reads these, and transformers leaves them out of a config that it makes itself.
        **{"scoring_func": "sigmoid", "use_routing_bias": True},
    },
    "gpt_oss": {
        **{"head_dim": 32, "sliding_window": 8, "num_local_experts": 8, "num_experts_per_tok": 3},
        **{"intermediate_size": 96, "rope_parameters": YARN | {"truncate": False} | BETAS},
    },
    "qwen3_5_text": {
        **{"head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 64, "linear_value_head_dim": 64},
    },
    "qwen3_next": {
        **{"head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 64, "linear_value_head_dim": 64, "mlp_only_layers": [1]},
        **{"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96},
        **{"shared_expert_intermediate_size": 160, "norm_topk_prob": True},
    },
    "qwen3_5_moe_text": {
        **{"head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 64, "linear_value_head_dim": 64},
        **{"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96},
        **{"shared_expert_intermediate_size": 160},
    },
    "deepseek_v2": {
        **{"q_lora_rank": None, "kv_lora_rank": 64, "qk_rope_head_dim": 16},
        **{"qk_nope_head_dim": 32, "v_head_dim": 24, "num_key_value_heads": 4},
        **{"first_k_dense_replace": 2, "n_routed_experts": 16, "num_experts_per_tok": 4},
        **{"n_shared_experts": 2, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
        **{"moe_intermediate_size": 96, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
        "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0},
    },
    "deepseek_v3": {
        **{"q_lora_rank": 48, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32},
        **{"v_head_dim": 24, "num_key_value_heads": 4, "first_k_dense_replace": 2},
        **{"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2},
        **{
            "moe_intermediate_size": 96,
            "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0},
        },
        **{"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    },
    "glm4_moe_lite": {
        **{"q_lora_rank": 48, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32},
        **{"v_head_dim": 24, "num_key_value_heads": 4, "n_routed_experts": 8},
        **{"num_experts_per_tok": 3, "moe_intermediate_size": 96, "first_k_dense_replace": 1},
    },
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3},
}
"""model_type -> what its config sets beside `random_model.SMALL`."""
LATENTS_OF_VLLM = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 32}
"""The widths of a latent attention that vLLM's kernels on CPUs take."""
_ROTATED_BY_YARN = LATENTS_OF_VLLM | {"rope_parameters": SETTINGS["deepseek_v3"]["rope_parameters"]}
IN_VLLM: dict[str, dict[str, Any]] = dict.fromkeys(
    ("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), _ROTATED_BY_YARN
)
"""model_type -> what its config also sets where vLLM on a CPU computes it without the kernels; a
plain rope is a fault of its own there."""
ALLOWED = dict.fromkeys(("cohere2", "glm4_moe_lite"), ("--allow-mismatch", "attributes"))
"""model_type -> the flags without which the other window of vLLM, or the other epsilon of
transformers, alone is reported."""


def family_model(folder: Path, family: str, dtype: str = "bfloat16", **changes: Any) -> Path:
    """The checkpoint of a family below `folder`, written the first time."""
    made = folder / "-".join([family, dtype, *map(str, changes)])
    settings = {"num_hidden_layers": LAYERS, **SETTINGS.get(family, {}), **changes}
    if not made.exists():
        write_random_model(made, model_type=family, dtype=dtype, **settings)
    return made


_SIGLIP = {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14}
_PIXTRAL = {"model_type": "pixtral", "image_size": 28, "patch_size": 14, "head_dim": 16}
_LAYER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
_LAYER |= {"num_attention_heads": 2}
WHOLES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5_text": ("qwen3_5", {"depth": 1, "hidden_size": 32, "num_heads": 2}),
    "qwen3_5_moe_text": ("qwen3_5_moe", {"depth": 1, "hidden_size": 32, "num_heads": 2}),
    "gemma3_text": ("gemma3", _SIGLIP | _LAYER),
    "gemma4_text": ("gemma4", {"model_type": "gemma4_vision", **_LAYER}),
    "mistral": ("mistral3", _PIXTRAL | _LAYER),
    "ministral3": ("mistral3", _PIXTRAL | _LAYER),
}
"""model_type of a decoder -> that of the checkpoint that also sees images, and the config of its
part for images."""
_BESIDE = {
    "": ("vision_tower.vision_model.post_layernorm.weight", "multi_modal_projector.norm.weight"),
    "model.": ("model.vision_tower.ln_pre.weight", "model.multi_modal_projector.norm.weight"),
}
"""The start of a name as published, or as some releases of transformers save it -> tensors of the
part for images."""


def with_vision(folder: Path, text: Path, start: str = "") -> Path:
    """The checkpoint `text` as its publisher stores it: with a part for images, and with the
    decoder's config and tensors inside. Written to `folder`. `start`: one of `_BESIDE`."""
    shutil.copytree(text, folder)
    config = json.loads((folder / "config.json").read_text())
    (decoder,) = config.pop("architectures")
    kind, images = WHOLES[config["model_type"]]
    inside, head = "model.language_model.", "lm_head."
    beside: tuple[str, ...] = ("model.visual.blocks.0.norm1.weight", "mtp.fc.weight")
    whole = {"vision_config": images, "tie_word_embeddings": config.get("tie_word_embeddings")}
    if kind == "gemma4":
        beside = tuple(f"model.{part}.weight" for part in ("vision_tower.a", "embed_vision.b"))
    if kind in ("gemma3", "mistral3"):
        beside = _BESIDE[start]
        if not start:
            inside, head = "language_model.model.", "language_model.lm_head."
        decoder = f"{kind.title()}ForCausalLM"
    if kind == "gemma3":
        # Published configs leave out what is usual.
        assert config.pop("rms_norm_eps") == 1e-6
    if kind == "mistral3":
        # Mistral publishes another form of its weights beside these.
        (folder / "params.json").write_text("{}")
        other = {"layers.0.attention.wq.weight": torch.zeros(2, 2)}
        save_file(other, folder / "consolidated.safetensors")
    whole |= {
        "architectures": [decoder.replace("ForCausalLM", "ForConditionalGeneration")],
        **{"model_type": kind, "dtype": config.pop("dtype"), "text_config": config},
    }
    (folder / "config.json").write_text(json.dumps(whole))
    stored = {}
    for path in sorted(text.glob("*.safetensors")):
        tensors = {
            inside + name.removeprefix("model.")
            if name.startswith("model.")
            else name.replace("lm_head.", head): value
            for name, value in load_file(path).items()
        }
        save_file(tensors, folder / path.name, metadata={"format": "pt"})
        stored |= dict.fromkeys(tensors, path.name)
    extra = {name: torch.ones(32, dtype=torch.bfloat16) for name in beside}
    save_file(extra, folder / "extra.safetensors", metadata={"format": "pt"})
    stored |= dict.fromkeys(extra, "extra.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": stored}))
    return folder
