"""Small models of published shapes, with random weights."""

from pathlib import Path
from typing import Any

from random_model import write_random_model

COMMON: dict[str, Any] = {
    **{"dtype": "bfloat16", "hidden_size": 256, "head_dim": 64, "num_hidden_layers": 4},
    "max_position_embeddings": 1024,
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}
KINDS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
MODELS: dict[str, dict[str, Any]] = {
    "glm4_moe": {
        **{"first_k_dense_replace": 1, "moe_intermediate_size": 128, "n_shared_experts": 1},
        **{"n_routed_experts": 32, "num_experts_per_tok": 4, "routed_scaling_factor": 2.5},
        **{"n_group": 4, "topk_group": 2, "use_qk_norm": True, "attention_bias": True},
    },
    "gemma2": {
        **{"layer_types": KINDS, "sliding_window": 32, "query_pre_attn_scalar": 48},
        **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        **{"layer_types": KINDS, "sliding_window": 32, "query_pre_attn_scalar": 48},
        "rope_parameters": {
            "sliding_attention": DEFAULT_ROPE,
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        },
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        **{"num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 256},
        # vLLM reads no layer_types of this family.
        **{"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 32},
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 1.5e5, "factor": 32.0, "truncate": False},
            **{"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 64},
        },
    },
    "qwen3_next": {
        **{"linear_num_key_heads": 4, "linear_num_value_heads": 8},
        **{"linear_key_head_dim": 64, "linear_value_head_dim": 64, "mlp_only_layers": [1]},
        **{"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 128},
        **{"shared_expert_intermediate_size": 128, "norm_topk_prob": True},
    },
}
"""model_type -> its settings."""


def write_model(folder: Path, model_type: str) -> str:
    """Writes the checkpoint; returns its path."""
    settings = COMMON | MODELS[model_type]
    return str(write_random_model(folder, model_type=model_type, **settings))
