"""Every layout of the rollout against every layout of the trainer, of the embedded model and of one
with fewer key-value heads than ranks: no site of any row has another bit, and off there is drift.

Each engine is captured once, scoring the tokens that vLLM sampled on one rank, and every pair of
captures is compared. RLK_LAYOUT_MATRIX=FILE.json collects what was found, for the reports.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import command_line, require_engine, write_few_prompts
from random_model import write_random_model

from rlk_align.data import data_path

whole_matrix = pytest.mark.whole_matrix
ROLLOUTS = ("vllm", "vllm:tp=2", "vllm:tp=4")
TRAINERS = (
    *("megatron", "megatron:tp=2", "megatron:tp=2,sp=1", "megatron:tp=4", "megatron:tp=4,sp=1"),
    *("fsdp:dp=1", "fsdp:dp=2", "fsdp:dp=4", "hf"),
)
SLICED = ("megatron:cp=2", "megatron:cp=4,input=packed", "megatron:tp=2,cp=2,sp=1")
"""Ranks share sequences."""
STAGES = ("megatron:pp=2", "megatron:tp=2,pp=2,sp=1")
OF_MODEL = {
    "embedded": (*TRAINERS, *SLICED, *STAGES, "megatron:cp=2,pp=2", "megatron:pp=4"),
    "grouped": (*TRAINERS, *SLICED, *STAGES),
}
QUICK = ("megatron:tp=2", "megatron:tp=4,sp=1", "fsdp:dp=4")
"""Beside what `test_tensor_parallel.py` compares."""
EVERY = [(name, train) for name, trainers in OF_MODEL.items() for train in trainers]
GROUPED: dict[str, Any] = {
    "model_type": "llama",
    "attention_bias": True,
    "mlp_bias": True,
    "hidden_size": 96,
    "head_dim": 32,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
    "vocab_size": 1031,
}
"""Biases of row-parallel products, a tied head and a padded vocabulary too."""
NEW_TOKENS = 8

Captured = Callable[..., Path]


@pytest.fixture(scope="module")
def captured(folder: Path) -> Captured:
    """The run in which an engine sampled, or scored what vLLM sampled on one rank."""
    inner = command_line(folder, "command")
    prompts = write_few_prompts(folder / "few.jsonl")

    def model(name: str, dtype: str) -> Path:
        made = folder / f"model-{name}-{dtype}"
        if name == "embedded":
            return data_path("model")
        if not made.exists():
            write_random_model(made, dtype=dtype, **GROUPED)
        return made

    def capture(engine: str, name: str, dtype: str, kernels: str) -> Path:
        run = folder / "-".join((engine.replace(":", "_"), name, dtype, kernels))
        if not run.exists():
            require_engine(engine.partition(":")[0])
            options = f"{':' if ':' not in engine else ','}dtype={dtype},kernels={kernels}"
            samples = engine.startswith("vllm")
            tokens = [] if samples else ["--tokens", capture("vllm", name, dtype, kernels)]
            asked = ("--prompts", prompts, "--max-new-tokens", NEW_TOKENS) if samples else tokens
            done = inner(
                *("capture", "--engine", f"{engine}{options}", "--model", model(name, dtype)),
                *(*asked, "-o", run),
                shared=False,
            )
            assert done.code == 0, done.out + done.err
        return run

    return capture


@pytest.fixture(scope="module")
def found(folder: Path, captured: Captured) -> Callable[..., dict[str, Any]]:
    """What a comparison of two layouts says."""
    inner = command_line(folder)

    def compare(
        rollout: str, train: str, name: str, dtype: str, kernels: str = "rlk"
    ) -> dict[str, Any]:
        runs = [captured(engine, name, dtype, kernels) for engine in (rollout, train)]
        # Without the kernels ranks sample other tokens: they score those of one.
        done = inner("compare", *runs, "--contract", "bitwise")
        assert done.verdict is not None, done.out + done.err
        verdict = done.verdict
        cell = {
            **{"rollout": rollout, "train": train, "model": name, "dtype": dtype},
            **{"kernels": kernels, "code": done.code, "first": done.first},
            "rows": verdict["coverage"]["paired"],
            "expected": verdict["coverage"]["expected"],
            "edges": verdict["edges"],
            "rows_differ": sum(
                int(b["value"]) for b in verdict["breaches"] if b["limit"] == "operator-bits"
            ),
        }
        if record := os.environ.get("RLK_LAYOUT_MATRIX"):
            with Path(record).open("a") as file:
                file.write(json.dumps(cell) + "\n")
        return cell

    return compare


def assert_no_bit_differs(cell: dict[str, Any]) -> None:
    assert cell["code"] == 0, cell
    assert cell["first"] is None
    assert cell["rows"] == cell["expected"] > 5000
    assert set(cell["edges"]) == {"decode_vs_prefill", "prefill_vs_train", "decode_vs_train"}
    for edge in cell["edges"].values():
        assert edge["tokens"] > 20
        assert edge["bit_mismatches"] == 0
        assert edge["max_abs_dlogp"] == 0.0


@pytest.mark.parametrize("train", QUICK)
def test_layouts_that_differ_move_no_bit(found: Callable[..., dict[str, Any]], train: str) -> None:
    assert_no_bit_differs(found("vllm", train, "grouped", "bfloat16"))


@whole_matrix
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("name", "train"), EVERY)
@pytest.mark.parametrize("rollout", ROLLOUTS)
def test_no_pair_of_layouts_moves_a_bit(
    found: Callable[..., dict[str, Any]], rollout: str, train: str, name: str, dtype: str
) -> None:
    assert_no_bit_differs(found(rollout, train, name, dtype))


@whole_matrix
@pytest.mark.parametrize(("name", "train"), EVERY)
def test_without_the_kernels_layouts_drift(
    found: Callable[..., dict[str, Any]], train: str, name: str
) -> None:
    cell = found("vllm", train, name, "bfloat16", "off")
    assert cell["code"] == 1, cell
    assert cell["edges"]["prefill_vs_train"]["bit_mismatches"] > 0
