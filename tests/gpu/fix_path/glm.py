"""A small GLM-4.5: its shape, of random weights."""

from pathlib import Path
from typing import Any

from random_model import write_random_model

SETTINGS: dict[str, Any] = {
    **{"model_type": "glm4_moe", "dtype": "bfloat16", "hidden_size": 256, "head_dim": 64},
    **{"num_hidden_layers": 4, "first_k_dense_replace": 1, "max_position_embeddings": 1024},
    **{"n_routed_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 128},
    **{"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 1},
    **{"use_qk_norm": True, "attention_bias": True},
}


def write_glm(folder: Path) -> str:
    """Writes the checkpoint; returns its path."""
    return str(write_random_model(folder, **SETTINGS))
