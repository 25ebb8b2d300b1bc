"""Settings of config.json that the description of a family does not cover are refused by name, and
published configs are not."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlk_align.errors import ModelError
from rlk_align.model.config_keys import check_settings, unknown_settings
from rlk_align.model.families import FAMILIES, layer_kind
from rlk_align.model.rotary import rope_parameters
from rlk_align.model.shape import is_tied, read_shape

HUB: dict[str, Any] = {
    **{"attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02},
    **{"bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 4096, "use_cache": True},
    **{"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 256},
    **{"num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-5},
    **{"rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    "transformers_version": "4.43.0",
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
LLAMA3 |= {"original_max_position_embeddings": 8192}
QWEN = {"max_window_layers": 28, "sliding_window": 131072, "use_sliding_window": False}
GEMMA_4: dict[str, Any] = {
    **{"attention_bias": False, "attention_k_eq_v": True, "enable_moe_block": False},
    **{"final_logit_softcapping": 30.0, "global_head_dim": 512, "hidden_size_per_layer_input": 0},
    **{"hidden_activation": "gelu_pytorch_tanh", "layer_types": ["sliding_attention"] * 5},
    **{"moe_intermediate_size": None, "num_experts": None, "num_global_key_value_heads": 1},
    **{"num_kv_shared_layers": 0, "top_k_experts": None, "use_double_wide_mlp": False},
    **{"sliding_window": 1024, "vocab_size_per_layer_input": 262144, "num_hidden_layers": 6},
    "use_bidirectional_attention": "vision",
    "rope_parameters": {
        "full_attention": {
            **{"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
        },
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
}
GEMMA_4["layer_types"].append("full_attention")
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B-Instruct": {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False},
        **{"eos_token_id": [128001, 128008], "mlp_bias": False, "pretraining_tp": 1},
        "rope_scaling": LLAMA3,
    },
    "Llama-3.2-1B": {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 16},
        **{"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1},
        **{"rope_scaling": LLAMA3 | {"factor": 32.0}, "tie_word_embeddings": True},
    },
    "SmolLM2-135M": {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "is_llama_config": True},
        **{"attention_bias": False, "pretraining_tp": 1, "rope_interleaved": False},
        **{"rope_scaling": None, "tie_word_embeddings": True},
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    },
    "Mistral-7B-Instruct-v0.3": {
        **{"architectures": ["MistralForCausalLM"], "model_type": "mistral"},
        "sliding_window": None,
    },
    "Qwen2.5-7B": {
        **{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_mrope": False},
        **QWEN,
    },
    "Qwen3-8B": {
        **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32},
        **{"attention_bias": False, "rope_scaling": None, "sliding_window": None},
        **{"max_window_layers": 36, "use_sliding_window": False},
    },
    "Qwen3-30B-A3B": {
        **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 32},
        **{"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        **{"moe_intermediate_size": 32, "norm_topk_prob": True, "num_experts": 8},
        **{"num_experts_per_tok": 2, "output_router_logits": False, "rope_scaling": None},
        **{"router_aux_loss_coef": 0.001, "sliding_window": None, "use_sliding_window": False},
        "max_window_layers": 48,
    },
    "Mixtral-8x7B-v0.1": {
        **{"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"},
        **{"num_experts_per_tok": 2, "num_local_experts": 8, "output_router_logits": False},
        **{"router_aux_loss_coef": 0.02, "sliding_window": None},
    },
    "GLM-4.5": {
        **{"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "head_dim": 16},
        **{"attention_bias": True, "pad_token_id": 250, "eos_token_id": [250, 251]},
        **{"partial_rotary_factor": 0.5, "moe_intermediate_size": 32, "norm_topk_prob": True},
        **{"n_group": 1, "topk_group": 1, "n_routed_experts": 8, "n_shared_experts": 1},
        **{"routed_scaling_factor": 2.5, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
        **{"rope_scaling": None, "num_nextn_predict_layers": 1, "use_qk_norm": True},
    },
    "Qwen1.5-MoE-A2.7B": {
        **{"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", **QWEN},
        **{"decoder_sparse_step": 1, "moe_intermediate_size": 32, "norm_topk_prob": False},
        **{"num_experts": 8, "num_experts_per_tok": 2, "output_router_logits": False},
        **{"router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 64},
    },
    "granite-3.1-1b-a400m-base": {
        **{"architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe"},
        **{"attention_bias": False, "attention_dropout": 0.1, "attention_multiplier": 0.015625},
        **{"embedding_multiplier": 12.0, "logits_scaling": 6.0, "residual_multiplier": 0.22},
        **{"num_experts_per_tok": 2, "num_local_experts": 8, "output_router_logits": False},
        **{"rope_scaling": None, "router_aux_loss_coef": 0.0, "tie_word_embeddings": True},
    },
    "granite-4.0-h-tiny": {
        **{"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid"},
        **{"attention_bias": False, "attention_multiplier": 0.0078125, "logits_scaling": 6},
        **{"embedding_multiplier": 12, "residual_multiplier": 0.22, "mamba_chunk_size": 256},
        **{"layer_types": ["mamba", "attention"], "mamba_conv_bias": True, "mamba_d_conv": 4},
        **{"mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1},
        **{"mamba_n_heads": 2, "mamba_proj_bias": False, "normalization_function": "rmsnorm"},
        **{"num_experts_per_tok": 6, "num_local_experts": 64, "output_router_logits": False},
        **{"position_embedding_type": "nope", "rope_scaling": None, "router_aux_loss_coef": 0.01},
        **{"shared_intermediate_size": 1024, "tie_word_embeddings": True},
    },
    "ERNIE-4.5-21B-A3B-PT": {
        **{"architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe"},
        **{"use_bias": False, "moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 2},
        **{"moe_intermediate_size": 32, "moe_layer_start_index": 1, "moe_layer_interval": 1},
        **{"moe_capacity": [8, 8, 8], "moe_gate": "topk", "moe_use_aux_free": True},
        **{"num_nextn_predict_layers": 1, "tie_word_embeddings": True},
    },
    "MiniMax-M2 (in bf16)": {
        **{"architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "head_dim": 32},
        **{"num_experts_per_tok": 2, "num_local_experts": 8, "output_router_logits": False},
        **{"qk_norm_type": "per_layer", "rotary_dim": 16, "router_aux_loss_coef": 0.001},
        **{"router_jitter_noise": 0.0, "scoring_func": "sigmoid", "sliding_window": None},
        **{"use_qk_norm": True, "use_routing_bias": True},
    },
    "gpt-oss-20b (in bf16)": {
        **{"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 32},
        **{"attention_bias": True, "experts_per_token": 2, "initial_context_length": 4096},
        **{"layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 8192},
        **{"num_experts_per_tok": 2, "num_local_experts": 8, "output_router_logits": False},
        **{"router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0},
        "rope_scaling": {
            **{"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
            **{"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        },
    },
    "Qwen3-Next-80B-A3B-Instruct": {
        **{"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "head_dim": 32},
        **{"attention_bias": False, "decoder_sparse_step": 1, "full_attention_interval": 2},
        **{"linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_num_key_heads": 2},
        **{"linear_num_value_heads": 4, "linear_value_head_dim": 16, "mlp_only_layers": []},
        **{"moe_intermediate_size": 32, "norm_topk_prob": True, "num_experts": 8},
        **{"num_experts_per_tok": 2, "output_router_logits": False, "partial_rotary_factor": 0.25},
        **{"rope_scaling": None, "router_aux_loss_coef": 0.001, "use_sliding_window": False},
        "shared_expert_intermediate_size": 32,
    },
    "the text model of Qwen3.5-4B": {
        **{"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "head_dim": 32},
        **{"attention_bias": False, "attn_output_gate": True, "full_attention_interval": 2},
        **{"layer_types": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 4},
        **{"linear_key_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_value_head_dim": 16, "mamba_ssm_dtype": "float32", "mlp_only_layers": []},
        **{"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False},
        "rope_parameters": {
            **{"mrope_interleaved": True, "mrope_section": [2, 1, 1], "rope_type": "default"},
            **{"rope_theta": 1e7, "partial_rotary_factor": 0.25},
        },
    },
    "OLMoE-1B-7B-0924": {
        **{"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "attention_bias": False},
        **{"clip_qkv": None, "norm_topk_prob": False, "num_experts": 8, "num_experts_per_tok": 2},
        **{"output_router_logits": False, "rope_scaling": None, "router_aux_loss_coef": 0.01},
    },
    "OLMo-2-1124-7B": {
        **{"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "attention_bias": False},
        **{"rope_scaling": None, "torch_dtype": "float32", "pad_token_id": 250},
    },
    "Olmo-3-7B-Instruct": {
        **{"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "sliding_window": 4096},
        **{"attention_bias": False, "layer_types": ["sliding_attention", "full_attention"]},
        "rope_scaling": {
            **{"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
            **{"attention_factor": 1.2079, "beta_fast": 32.0, "beta_slow": 1.0},
        },
    },
    "Seed-OSS-36B-Instruct": {
        **{"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "head_dim": 128},
        **{"attention_bias": True, "attention_out_bias": False, "attention_dropout": 0.1},
        **{"residual_dropout": 0.1, "mlp_bias": False, "rope_scaling": {"rope_type": "default"}},
    },
    "SmolLM3-3B": {
        **{"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "mlp_bias": False},
        **{"attention_bias": False, "no_rope_layer_interval": 4, "no_rope_layers": [1, 0]},
        **{"layer_types": ["full_attention"] * 2, "max_window_layers": 28, "pretraining_tp": 2},
        **{"rope_scaling": None, "sliding_window": None, "use_sliding_window": False},
    },
    "Ministral-3-8B-Instruct": {
        **{"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"},
        **{"head_dim": 128, "sliding_window": None},
        "rope_parameters": {
            **{"type": "yarn", "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0},
            **{"original_max_position_embeddings": 16384, "beta_fast": 32.0, "beta_slow": 1.0},
            **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
    },
    "granite-3.1-8b-instruct": {
        **{"architectures": ["GraniteForCausalLM"], "model_type": "granite", "mlp_bias": False},
        **{"attention_bias": False, "attention_multiplier": 0.0078125, "rope_scaling": None},
        **{"embedding_multiplier": 12.0, "logits_scaling": 16.0, "residual_multiplier": 0.22},
        **{"attention_dropout": 0.1, "tie_word_embeddings": True},
    },
    "GLM-4-9B-0414": {
        **{"architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "attention_bias": True},
        **{"head_dim": 128, "partial_rotary_factor": 0.5, "pad_token_id": 250},
        "eos_token_id": [250, 251, 252],
    },
    "ERNIE-4.5-0.3B-PT": {
        **{"architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5", "head_dim": 128},
        **{"use_bias": False, "use_cache": False, "tie_word_embeddings": True},
    },
    "Phi-3-mini-128k-instruct": {
        **{"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "attention_bias": False},
        **{"embd_pdrop": 0.0, "resid_pdrop": 0.0, "original_max_position_embeddings": 4096},
        **{"max_position_embeddings": 131072, "sliding_window": 262144},
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    },
    "phi-4": {
        **{"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "attention_bias": False},
        **{"embd_pdrop": 0.0, "resid_pdrop": 0.0, "original_max_position_embeddings": 16384},
        **{"rope_scaling": None, "sliding_window": None, "pad_token_id": 250},
    },
    "EXAONE-4.0-32B": {
        **{"architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "head_dim": 128},
        **{"sliding_window": 4096, "sliding_window_pattern": "LLLG", "rope_scaling": LLAMA3},
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "EXAONE-4.0-1.2B": {
        **{"architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "head_dim": 64},
        **{"sliding_window": None, "sliding_window_pattern": None, "rope_scaling": LLAMA3},
        **{"layer_types": ["full_attention"] * 2, "tie_word_embeddings": True},
    },
    "starcoder2-3b": {
        **{"architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2"},
        **{"activation_function": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"},
        **{"embedding_dropout": 0.1, "residual_dropout": 0.1, "attention_dropout": 0.1},
        **{"layer_norm_epsilon": 1e-5, "norm_epsilon": 1e-5, "norm_type": "layer_norm"},
        **{"mlp_type": "default", "scale_attention_softmax_in_fp32": True, "use_bias": True},
        **{"scale_attn_weights": True, "sliding_window": 4096, "tie_word_embeddings": True},
    },
    "c4ai-command-r7b-12-2024": {
        **{"architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "head_dim": 128},
        **{"cache_implementation": "hybrid", "layer_norm_eps": 1e-5, "layer_switch": 4},
        **{"logit_scale": 0.25, "order_of_interleaved_layers": "local_attn_first"},
        **{"position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "rope_scaling": None},
        **{"sliding_window": 4096, "sliding_window_pattern": 4, "use_embedding_sharing": True},
        **{"use_gated_activation": True, "use_parallel_block": True, "use_qk_norm": False},
        "use_parallel_embedding": True,
    },
    "gemma-7b": {
        **{"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "head_dim": 256},
        **{"attention_bias": False, "hidden_act": "gelu_pytorch_tanh", "rope_scaling": None},
        "hidden_activation": None,
    },
    "gemma-2-9b": {
        **{"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "head_dim": 256},
        **{"attention_bias": False, "attn_logit_softcapping": 50.0, "cache_implementation": "hyb"},
        **{"final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh"},
        **{"query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_size": 4096},
    },
    "gemma-3-1b-it": {
        **{"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 256},
        **{"attention_bias": False, "attn_logit_softcapping": None, "rope_scaling": None},
        **{"final_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh"},
        **{"query_pre_attn_scalar": 256, "rope_local_base_freq": 10000, "rope_theta": 1000000},
        **{"sliding_window": 512, "sliding_window_pattern": 6, "cache_implementation": "hybrid"},
    },
    "gemma-4, dense": {
        **{"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "head_dim": 256},
        **GEMMA_4,
    },
}
"""Configs as their authors published them, in shape; sizes are shrunk."""


def accepted(folder: Path, config: dict[str, Any]) -> None:
    """Raises what `compare` raises for this config.json before it looks at weights."""
    (folder / "config.json").write_text(json.dumps(config))
    check_settings(folder, config, read_shape(folder).family)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_accepted(tmp_path: Path, name: str) -> None:
    accepted(tmp_path, HUB | PUBLISHED[name])


def test_kinds_of_layers_that_some_family_has_are_not_called_unknown(tmp_path: Path) -> None:
    config = HUB | {"model_type": "cwm", "layer_types": ["full_attention", "sliding_attention"]}
    with pytest.raises(ModelError) as error:
        accepted(tmp_path, config | {"sliding_window": 8192})
    assert error.value.message.endswith("so the operators of its layers are unknown")
    with pytest.raises(ModelError, match=r"are unknown; no known family has its layer_types$"):
        accepted(tmp_path, config | {"layer_types": ["chunked_attention"] * 2})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        # Those of its other forms; transformers' default is per-layer embeddings.
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input = 256 changes what"),
        ({"hidden_size_per_layer_input": ...}, "hidden_size_per_layer_input = 256 changes what"),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers = 3 changes which layers take keys"),
        ({"enable_moe_block": True, "num_experts": 8}, "enable_moe_block = True changes the MLP"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all' changes whi"),
        ({"layer_types": ["sliding_attention"] * 6}, "the last layer has a window by layer_type"),
        ({"num_hidden_layers": 7, "layer_types": ...}, "the last layer has a window by layer_type"),
        ({"per_layer_config": {"5": {"hidden_size": 8}}}, "per_layer_config = {'5': {'hidden_s"),
        ({"per_layer_config": {"1": {"head_dim": 64}}}, "per_layer_config = {'1': {'head_dim'"),
        ({"per_layer_config": {"5": 64}}, "per_layer_config = {'5': 64} is not one size"),
        ({"per_layer_config": [64]}, r"per_layer_config = \[64\] is not one size"),
        ({"global_head_dim": "wide"}, "'wide' in per_layer_config, global_head_dim or num_global_"),
        ({"per_layer_config": {"5": {"head_dim": -2}}}, "-2 in per_layer_config, global_head_dim"),
    ],
)
def test_forms_of_gemma_4_that_the_description_does_not_cover_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    config = HUB | PUBLISHED["gemma-4, dense"] | changes
    with pytest.raises(ModelError, match=said):
        accepted(tmp_path, {key: value for key, value in config.items() if value is not ...})


@pytest.mark.parametrize(
    ("changes", "wide", "shared"),
    [
        ({}, (512, 1), True),
        ({"num_global_key_value_heads": None}, (512, 2), True),
        # Without attention_k_eq_v, transformers does not read the number of heads.
        ({"attention_k_eq_v": False}, (512, 2), False),
        # As transformers 5.19 saves it.
        ({"per_layer_config": {"5": {"head_dim": 64, "num_key_value_heads": 1}}}, (64, 1), True),
        ({"per_layer_config": {"5": {"head_dim": 64}}}, (64, 2), True),
        ({"per_layer_config": {}}, (256, 2), True),
    ],
)
def test_the_heads_of_gemma_4_are_those_of_transformers(
    tmp_path: Path, changes: dict[str, Any], wide: tuple[int, int], shared: bool
) -> None:
    from transformers import AutoConfig

    config = HUB | PUBLISHED["gemma-4, dense"] | changes
    accepted(tmp_path, config)
    shape, theirs = read_shape(tmp_path), AutoConfig.from_pretrained(tmp_path).per_layer_config
    assert (shape.wide_head_dim, shape.wide_kv_heads) == wide
    assert (shape.wide_layers, shape.keys_are_values) == ((5,), shared)
    assert [(s.head_dim, s.kv_heads) for s in map(shape.at, range(6))] == [
        (each.head_dim, each.num_key_value_heads) for each in theirs
    ]
    assert shape.has("key_v_norm") == shared
    assert not any(shape.at(None) is not each for each in map(shape.at, range(5)))


HUB_FORMS: list[dict[str, Any]] = [
    # transformers 5 beside transformers 4
    {"dtype": "bfloat16", "rope_parameters": LLAMA3 | {"rope_theta": 5e5}, "rope_scaling": LLAMA3},
    {"_name_or_path": "meta-llama/Llama-3.1-8B", "_attn_implementation_autoset": True},
    {"head_dim": None, "rope_scaling": None, "pad_token_id": None, "quantization_config": None},
    {"layer_types": ["full_attention", "full_attention"], "id2label": {"0": "LABEL_0"}},
    {"temperature": 0.6, "top_p": 0.9, "do_sample": True, "unsloth_fixed": True},
    {"is_causal": True, "auto_map": None, "logits_scaling": 1.0, "final_logit_softcapping": None},
    {"sliding_window": 4096, "use_sliding_window": False, "n_shared_experts": 0},
]


@pytest.mark.parametrize("changes", HUB_FORMS)
def test_forms_of_the_hub_are_accepted(tmp_path: Path, changes: dict[str, Any]) -> None:
    accepted(tmp_path, HUB | PUBLISHED["Llama-3.1-8B-Instruct"] | changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2, "llama_4_scaling_beta": 0.1}},
            "rope_parameters.llama_4_scaling_beta = 0.1 changes attention's scale by the position, "
            "and the description of family 'llama' does not say how",
        ),
        ({"rope_scaling": {"type": "default", "mrope_section": [2, 3]}}, "rope_scaling.mrope_sec"),
        ({"logits_scaling": 8.0}, "logits_scaling = 8.0 changes the logits, and"),
        ({"sliding_window": 4096}, "sliding_window = 4096 changes which keys attention sees"),
        ({"is_causal": False}, "is_causal = False changes which keys attention sees"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = ['full"),
        ({"some_switch": 0.5}, "some_switch = 0.5 may change log-probs, and the description"),
        ({"some_switch": float("nan")}, "some_switch = nan may change"),
        ({"clip_qkv": 8, "final_logit_softcapping": 30.0}, "(nor does it say what final_logit_sof"),
        ({"auto_map": {"AutoModelForCausalLM": "model.Model"}}, "auto_map names code in the check"),
    ],
)
def test_a_setting_that_the_family_does_not_list_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=re.escape(said)):
        accepted(tmp_path, HUB | PUBLISHED["Llama-3.1-8B-Instruct"] | changes)


def test_a_window_is_known_to_the_families_that_have_one_and_its_kinds_of_layers_too(
    tmp_path: Path,
) -> None:
    mistral = HUB | PUBLISHED["Mistral-7B-Instruct-v0.3"] | {"sliding_window": 8}
    accepted(tmp_path, mistral | {"layer_types": ["sliding_attention", "full_attention"]})
    with pytest.raises(ModelError, match=re.escape("layer_types = ['chunked_attention'")):
        accepted(tmp_path, mistral | {"layer_types": ["chunked_attention", "full_attention"]})


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_what_transformers_saves_by_default_is_accepted(family: str) -> None:
    from transformers import AutoConfig

    config, of = AutoConfig.for_model(family).to_dict(), FAMILIES[family]
    assert unknown_settings(config, of.keys, of.values) == of.uncovered


def test_the_layers_of_hub_configs(tmp_path: Path) -> None:
    """Without `layer_types`, the pattern of windows and the thetas follow from older keys."""
    config = HUB | PUBLISHED["gemma-3-1b-it"] | {"num_hidden_layers": 6}
    kinds = [layer_kind(config, i) for i in range(6)]
    assert kinds == ["sliding_attention"] * 5 + ["full_attention"]
    assert [rope_parameters(config, i)["rope_theta"] for i in (0, 5)] == [1e4, 1e6]
    del config["rope_theta"], config["rope_local_base_freq"]
    assert [rope_parameters(config, i)["rope_theta"] for i in (0, 5)] == [1e4, 1e6]
    assert layer_kind(config | {"sliding_window_pattern": 2}, 1) == "full_attention"
    olmo = HUB | PUBLISHED["Olmo-3-7B-Instruct"]
    assert [rope_parameters(olmo, i)["rope_type"] for i in (0, 1)] == ["default", "yarn"]
    (tmp_path / "config.json").write_text(json.dumps(HUB | PUBLISHED["SmolLM3-3B"]))
    assert read_shape(tmp_path).unrotated_layers == (1,)
    assert is_tied({"model_type": "gemma3_text"})


def test_what_gpt_oss_leaves_out_of_its_config(tmp_path: Path) -> None:
    """transformers has a yarn rope and alternating windows by default."""
    config = HUB | {"model_type": "gpt_oss", "num_experts_per_tok": 2, "num_local_experts": 8}
    config = {k: v for k, v in config.items() if k != "rope_theta"}
    accepted(tmp_path, config)
    shape, rope = read_shape(tmp_path), rope_parameters(config)
    assert (shape.swiglu_alpha, shape.swiglu_limit) == (1.702, 7.0)
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("yarn", 32.0, 1.5e5)
    kinds = [layer_kind(config, i) for i in range(2)]
    assert kinds == ["sliding_attention", "full_attention"]
    with pytest.raises(ModelError, match="swiglu_limit is 0"):
        accepted(tmp_path, config | {"swiglu_limit": 0})


def test_the_layers_and_the_gates_of_hybrid_configs(tmp_path: Path) -> None:
    config = HUB | PUBLISHED["Qwen3-Next-80B-A3B-Instruct"] | {"num_hidden_layers": 4}
    accepted(tmp_path, config)
    shape = read_shape(tmp_path)
    assert (shape.delta_layers, shape.first_attention) == ((0, 2), 1)
    assert (shape.size("delta_inputs"), shape.size("gated_query_heads")) == (128, 256)
    for changes, said in (
        ({"layer_types": ["linear_attention"] * 4}, "no layer has full_attention"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads=3 is no multiple of"),
        ({"attn_output_gate": False}, "attn_output_gate = False changes the output of attention"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype = 'bfloat16' changes the precision"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types = ['full"),
    ):
        with pytest.raises(ModelError, match=re.escape(said)):
            accepted(tmp_path, config | changes)


def test_a_longrope_is_compared_up_to_its_original_length(tmp_path: Path) -> None:
    config = HUB | PUBLISHED["Phi-3-mini-128k-instruct"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_shape(tmp_path).context == 4096
    del config["original_max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_shape(tmp_path).context == 131072


def test_the_refusal_of_an_unknown_family_says_what_is_unknown_in_it(tmp_path: Path) -> None:
    config = HUB | {"model_type": "zamba2", "mamba_d_state": 16, "logits_scaling": 8.0}
    config |= {"num_mem_blocks": 2, "adapter_rank": 64, "sliding_window": 8}
    with pytest.raises(ModelError) as refused:
        accepted(tmp_path, config)
    assert refused.value.message.endswith("no known family has its adapter_rank, num_mem_blocks")
    for words in ("`import` and `explain`", "docs/add-a-family.md"):
        assert words in refused.value.fix
    page = Path(__file__).parents[2] / "docs/add-a-family.md"
    assert page.is_file()
