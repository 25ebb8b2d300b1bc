"""Llama-, Qwen2- and Mistral-shaped models with the kernels in every engine: biases, scaled
frequencies, windows, tied embeddings, a padded vocabulary, fp16. Qwen3 is the embedded model."""

from pathlib import Path
from typing import Any

import pytest
from conftest import Cli, command_line, require_engine, write_few_prompts
from random_model import write_random_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 64,
}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
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
        "rope_parameters": DEFAULT,
        "sliding_window": WINDOW,
    },
    "qwen2": {"model_type": "qwen2", "dtype": "float16", "rope_parameters": LLAMA3},
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
