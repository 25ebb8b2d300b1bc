"""Llama-, Qwen- and Mistral-shaped models with the kernels in every engine: biases, scaled ropes
beyond the context that they stretch, windows, tied embeddings, a padded vocabulary, fp16. The
default rope is the embedded model's."""

from pathlib import Path
from typing import Any

import pytest
from command import Cli, capture_of, command_line, require_engine, write_few_prompts
from random_model import write_random_model

from rlk_align.model.prompts import TokenBatch

pytestmark = pytest.mark.whole_matrix
ORIGINAL = 16
"""Positions before the ropes are stretched."""
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": ORIGINAL,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
WINDOW = 8
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "dtype": "bfloat16",
        "rope_parameters": LLAMA3,
        "attention_bias": True,
        "mlp_bias": True,
        # hidden / heads is 24.
        "hidden_size": 96,
        "head_dim": 32,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "vocab_size": 1031,
    },
    "mistral": {
        "model_type": "mistral",
        "dtype": "float32",
        "rope_parameters": LINEAR,
        "sliding_window": WINDOW,
    },
    "qwen2": {"model_type": "qwen2", "dtype": "float16", "rope_parameters": YARN},
    "qwen3": {
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "head_dim": 64,
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
    },
    "llama-yarn": {
        "model_type": "llama",
        "dtype": "float32",
        "rope_parameters": YARN | {"beta_fast": 8.0, "beta_slow": 2.0},
    },
}
TRAINING = ("hf", "fsdp:dp=2", "megatron", "megatron:input=packed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models and the runs lie: what one captured, the next takes."""
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module")
def cli(folder: Path) -> Cli:
    return command_line(folder)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("train", TRAINING)
def test_no_bit_differs(cli: Cli, folder: Path, name: str, train: str) -> None:
    require_engine("vllm")
    require_engine(train.partition(":")[0])
    if not (folder / name).exists():
        write_random_model(folder / name, **MODELS[name])
    prompts = write_few_prompts(folder / "few.jsonl")
    spec = f"{train}{',' if ':' in train else ':'}kernels=rlk"
    done = cli(
        *("compare", "--model", folder / name, "--prompts", prompts, "--max-new-tokens", 12),
        *("--rollout", "vllm:kernels=rlk", "--train", spec, "--run-dir", folder / f"run-{name}"),
        *("--contract", "bitwise"),
    )
    assert done.code == 0, done.out + done.err
    assert done.verdict is not None
    assert done.first is None
    assert done.verdict["dtype"] == MODELS[name]["dtype"]
    assert all(e["bit_mismatches"] == 0 for e in done.verdict["edges"].values())
    coverage = done.verdict["coverage"]
    assert coverage["paired"] == coverage["expected"] > 5000
    assert coverage["unpaired"] == []
    sampled = capture_of(folder / f"run-{name}", "rollout").folder / "tokens.parquet"
    assert max(len(s.ids) for s in TokenBatch.load(sampled).samples) > 3 * ORIGINAL
