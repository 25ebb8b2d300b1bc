"""Small models of transformers."""

from typing import Any

import pytest
import torch
from rlk_kernels.integrations import hf

transformers = pytest.importorskip("transformers")

ROPE = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8,
}  # fmt: skip


def small_model(family: str = "Llama", **config: Any) -> Any:
    """One layer, of random weights that are the same each time."""
    torch.manual_seed(0)
    usual = {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": dict(ROPE),
    }  # fmt: skip
    of_text = getattr(transformers, f"{family}TextConfig", None)
    settings = (of_text or getattr(transformers, f"{family}Config"))(**usual | config)
    return getattr(transformers, f"{family}ForCausalLM")(settings)


def with_kernels(family: str = "Llama", **config: Any) -> Any:
    """A small model that has the kernels, for inference."""
    model = small_model(family, **config).eval()
    hf.use_kernels(model)
    return model
