"""A small random checkpoint of StableLM, and of each of some families that `model/families.py` does
not describe."""

from pathlib import Path
from typing import Any

from random_model import write_random_model

_MAMBA = {
    **{"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1},
    **{"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_chunk_size": 32},
}
SETTINGS: dict[str, dict[str, Any]] = {
    # A state-space model beside attention in each layer, and multipliers.
    "falcon_h1": _MAMBA | {"mamba_expand": 1},
    # LayerNorms by 1 + weight, with biases, and a squared ReLU.
    "nemotron": {},
    # An activation with parameters.
    "apertus": {},
    # Convolutions in place of attention.
    "lfm2": {
        **{"layer_types": ["conv", "full_attention"], "conv_dim": 128, "block_use_swiglu": True},
        **{"block_dim": 128, "block_ff_dim": 256, "block_multiple_of": 32},
        **{"block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False},
    },
    # No attention at all, and a head that is tied.
    "mamba2": {
        **{"state_size": 16, "num_heads": 8, "head_dim": 32, "n_groups": 1, "chunk_size": 32},
        **{"expand": 2, "tie_word_embeddings": True},
    },
    # LayerNorms, and biases in some products.
    "stablelm": {"use_qkv_bias": True},
    "opt": {"ffn_dim": 256, "word_embed_proj_dim": 128},
    # A parallel block, and biases everywhere.
    "phi": {},
    # Products whose weights are stored transposed, with q, k and v in one.
    "gpt2": {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256},
    # A parallel block, and q, k and v of each head in one product.
    "gpt_neox": {},
    # Attention in some layers, and a state-space model in the others.
    "bamba": _MAMBA | {"mamba_expand": 2, "mamba_n_heads": 8, "attn_layer_indices": [1]},
}
"""model_type -> what its config sets beside `random_model.SMALL`."""
IN_VLLM = (
    "falcon_h1",
    "nemotron",
    "apertus",
    "mamba2",
    "opt",
    "stablelm",
    "gpt2",
    "phi",
    "gpt_neox",
)
"""Those that vLLM 0.32 loads on a CPU and computes as transformers does."""


def undescribed_model(folder: Path, family: str) -> Path:
    """The checkpoint of a family below `folder`, written the first time."""
    made = folder / family
    if not made.exists():
        write_random_model(made, model_type=family, dtype="bfloat16", **SETTINGS[family])
    return made
