"""Ranks that share a model: tensor parallel, with and without sequence parallelism, in vLLM and in
Megatron. Every site and log-prob has the bits of one rank, whatever layout the other side has."""

from pathlib import Path

import pytest
from bit_equal import assert_equal
from command import Cli, Outcome, require_engine, write_few_prompts
from random_model import write_random_model

whole_matrix = pytest.mark.whole_matrix
PAIRS = (
    ("vllm", "megatron:tp=2,sp=1", "bfloat16"),
    pytest.param("vllm:tp=2", "megatron:tp=2,sp=1", "bfloat16", marks=whole_matrix),
    pytest.param("vllm:tp=4", "megatron:tp=4", "bfloat16", marks=whole_matrix),
    pytest.param("vllm:tp=4", "hf", "bfloat16", marks=whole_matrix),
    pytest.param("vllm:tp=2", "fsdp:dp=2", "float32", marks=whole_matrix),
    pytest.param("vllm", "megatron:tp=4,sp=1,input=packed", "bfloat16", marks=whole_matrix),
    pytest.param("hf", "megatron:tp=2,batch=2,padding=left", "float32", marks=whole_matrix),
)


@pytest.mark.parametrize(("rollout", "train", "dtype"), PAIRS)
def test_ranks_move_no_bit(
    compare: Cli, folder: Path, rollout: str, train: str, dtype: str
) -> None:
    assert_equal(_compared(compare, folder, rollout, train, f"dtype={dtype},kernels=rlk"), 40)


@whole_matrix
@pytest.mark.parametrize("train", ["megatron:tp=2,sp=1", "megatron:tp=4"])
def test_fewer_key_value_heads_than_ranks_move_no_bit(
    compare: Cli, folder: Path, train: str
) -> None:
    """Biases of row-parallel products, a tied head and a padded vocabulary too."""
    made = folder / "grouped"
    if not made.exists():
        write_random_model(
            made, model_type="llama", dtype="bfloat16", attention_bias=True, mlp_bias=True,
            hidden_size=96, head_dim=32, num_key_value_heads=1, tie_word_embeddings=True,
            vocab_size=1031,
        )  # fmt: skip
    done = _compared(compare, folder, "vllm:tp=2", train, "kernels=rlk", "--model", made)
    assert done.code == 0, done.out + done.err
    assert done.verdict is not None
    assert done.first is None
    assert all(e["bit_mismatches"] == 0 for e in done.verdict["edges"].values())
    assert done.verdict["coverage"]["paired"] == done.verdict["coverage"]["expected"] > 5000


@whole_matrix
def test_without_the_kernels_ranks_drift(compare: Cli, folder: Path) -> None:
    done = _compared(compare, folder, "hf", "megatron:tp=2", "kernels=off")
    assert done.code == 1, done.out + done.err
    assert done.verdict is not None
    assert done.verdict["edges"]["prefill_vs_train"]["bit_mismatches"] > 0


@whole_matrix
def test_a_product_that_is_left_to_the_engine_drifts(compare: Cli, folder: Path) -> None:
    """The fault that the kernels mend, and where: partial sums of one operator."""
    done = _compared(compare, folder, "hf", "megatron:tp=2,except=down_proj", "kernels=rlk")
    assert done.code == 1, done.out + done.err
    assert done.first == "layers.0.down_proj"


def _compared(
    compare: Cli, folder: Path, rollout: str, train: str, options: str, *more: object
) -> Outcome:
    for engine in (rollout, train):
        require_engine(engine.partition(":")[0])
    rollout, train = (f"{e}{',' if ':' in e else ':'}{options}" for e in (rollout, train))
    prompts = write_few_prompts(folder / "few.jsonl")
    return compare(
        *more, *("--rollout", rollout, "--train", train, "--run-dir", folder / "run"),
        *("--prompts", prompts, "--max-new-tokens", 8),
    )  # fmt: skip
