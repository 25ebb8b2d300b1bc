"""The environment of the engine sglang, which `make sglang-env` makes, and a model for it."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
from command import REQUIRED

PYTHON = Path(
    os.environ.get("RLK_SGLANG_PYTHON", Path(__file__).parents[2] / ".venv-sglang/bin/python")
)
needed = pytest.mark.skipif(
    not PYTHON.exists() and "sglang" not in REQUIRED, reason="run make sglang-env"
)
"""Skips where the environment is missing; where it is required, the test fails then."""
if not PYTHON.exists():
    warnings.warn(f"sglang is not tested: no {PYTHON}; run make sglang-env", stacklevel=1)
EVERY_LAYER_SPARSE: dict[str, Any] = {
    **{"model_type": "qwen3_moe", "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 96, "tie_word_embeddings": False},
}
"""A random model that all engines run: SGLang makes every layer of a Qwen3-MoE sparse, and unties
the head."""

MODELS: dict[str, dict[str, Any]] = {
    "sparse": EVERY_LAYER_SPARSE,
    # A padded vocabulary, biases of attention, a tied head and one key-value head.
    "llama": {
        **{"model_type": "llama", "attention_bias": True, "tie_word_embeddings": True},
        **{"num_key_value_heads": 1, "vocab_size": 1031, "head_dim": 32},
    },
    "qwen2": {"model_type": "qwen2"},
}
"""Name -> the settings of a random model, for the pairs with the kernels."""


def sglang(options: str = "") -> str:
    """The engine's spec with these options."""
    return f"sglang:python={PYTHON}{',' if options else ''}{options}"
