"""Megatron whose ranks share sequences (cp), layers (pp) and experts (ep): every site and log-prob
has the bits of one rank, and a probe says of several ranks what it says of one. Dense models in
every layout: `test_layout_matrix.py`."""

import re
from pathlib import Path

import pytest
from bit_equal import THREE
from command import Cli, Outcome, command_line, require_engine, write_few_prompts

from rlk_align.data import data_path

MODELS = {"embedded": data_path("model"), "sparse": Path(__file__).parents[2] / "fixtures/sparse"}
whole_matrix = pytest.mark.whole_matrix
CASES = (
    ("embedded", "cp=2,pp=2", "bfloat16"),
    ("sparse", "ep=2,dispatcher=alltoall", "bfloat16"),
    *(
        pytest.param(*case, marks=whole_matrix)
        for case in (
            ("embedded", "tp=2,cp=2,sp=1,input=packed", "float32"),
            ("embedded", "cp=2,pp=2,batch=1", "float32"),
            ("sparse", "ep=2", "float32"),
            ("sparse", "ep=2,padding=left,batch=2", "bfloat16"),
            ("sparse", "ep=4,pp=2,input=packed", "bfloat16"),
            ("sparse", "cp=2,ep=2,dispatcher=alltoall", "float32"),
            ("sparse", "cp=2,pp=4", "bfloat16"),
        )
    ),
)


@pytest.fixture(scope="module")
def cli(folder: Path) -> Cli:
    return command_line(folder)


def compared(cli: Cli, folder: Path, name: str, options: str, dtype: str) -> Outcome:
    """HF against Megatron in that layout."""
    require_engine("megatron")
    return cli(
        *("compare", "--model", MODELS[name], "--contract", "bitwise"),
        *("--prompts", write_few_prompts(folder / "few.jsonl"), "--max-new-tokens", 6),
        *("--rollout", f"hf:dtype={dtype},kernels=rlk", "--run-dir", folder / "run"),
        *("--train", f"megatron:{options},dtype={dtype},kernels=rlk"),
    )


@pytest.mark.parametrize(("name", "options", "dtype"), CASES)
def test_ranks_move_no_bit(cli: Cli, folder: Path, name: str, options: str, dtype: str) -> None:
    done = compared(cli, folder, name, options, dtype)
    assert done.code == 0, done.out + done.err
    assert done.verdict is not None
    assert done.first is None
    assert set(done.verdict["edges"]) == THREE
    for edge in done.verdict["edges"].values():
        assert edge["tokens"] == done.verdict["tokens"] > 30
        assert edge["bit_mismatches"] == 0
    coverage = done.verdict["coverage"]
    assert coverage["unpaired"] == []
    assert coverage["paired"] == coverage["expected"] > 20_000


@whole_matrix
def test_a_probe_grafts_into_every_rank(folder: Path, cli: Cli) -> None:
    """vLLM adds and norms as one, so that a stage also overwrites what it was sent."""
    require_engine("vllm")
    require_engine("megatron")
    done = cli(
        *("probe", "--model", MODELS["embedded"], "--rollout", "vllm"),
        *("--prompts", write_few_prompts(folder / "few.jsonl"), "--max-new-tokens", 8),
        *("--train", "megatron:cp=2,pp=2,fault=norm-eps", "--run-dir", folder / "probed"),
    )
    assert done.code == 1, done.out + done.err
    assert done.first == "layers.0.attn_norm"
    # Of what the others introduce nothing is beyond rounding.
    assert re.search(r"introducers: [0-9]+, 1 beyond their budgets", done.out)
    assert re.search(r"layers\.0\.attn_norm +train", done.out)
