"""Small sparse models: the embedded one, and random ones of other families and settings."""

from pathlib import Path
from typing import Any

from command import Outcome
from random_model import write_random_model

SPARSE = Path(__file__).parents[2] / "fixtures/sparse"
RANDOM: dict[str, dict[str, Any]] = {
    "mixtral": {
        "model_type": "mixtral",
        "dtype": "bfloat16",
        "head_dim": 32,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
    },
    "not-normalized": {
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "head_dim": 32,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 96,
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
    },
    "odd-sizes": {
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "head_dim": 32,
        "hidden_size": 100,
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 36,
    },
    "one-group": {
        "model_type": "glm4_moe",
        "dtype": "bfloat16",
        "head_dim": 32,
        "n_routed_experts": 10,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "n_shared_experts": 2,
        "partial_rotary_factor": 1.0,
    },
    "corrected": {
        "model_type": "glm4_moe",
        "dtype": "bfloat16",
        "head_dim": 32,
        "num_hidden_layers": 3,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 96,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
        "attention_bias": True,
    },
}


def model_of(folder: Path, name: str) -> Path:
    """Where the model is; a random one is written below `folder` the first time."""
    if name == "sparse":
        return SPARSE
    if not (folder / name).exists():
        write_random_model(folder / name, **RANDOM[name])
    return folder / name


def assert_no_bit_differs(done: Outcome) -> None:
    """Of a compare of two engines, and every token goes to the same experts."""
    assert done.code == 0, done.out + done.err
    assert done.verdict is not None
    assert done.first is None
    for edge in done.verdict["edges"].values():
        assert edge["tokens"] == done.verdict["tokens"] > 60
        assert edge["bit_mismatches"] == 0
    coverage = done.verdict["coverage"]
    assert coverage["unpaired"] == []
    assert coverage["paired"] == coverage["expected"] > 5000
    for routing in done.verdict["routing"].values():
        assert routing["tokens"] > 100
        assert routing["flipped_tokens"] == 0
