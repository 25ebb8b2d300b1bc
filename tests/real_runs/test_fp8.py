"""Weights in blocks of fp8 in real engines: healthy pairs, with the kernels and without, and what
goes wrong with them."""

from pathlib import Path
from typing import Any

import pytest
from bit_equal import assert_equal
from block_fp8 import BLOCK, write_fp8
from command import Cli, Outcome, command_line, require_engine
from rlk_kernels.block_fp8 import quantise

from rlk_align.data import data_path

MODEL = data_path("model")
KERNELS = "vllm:model={fp8},kernels=rlk"
CONTRACT = """
id = "fp8"
version = "1.0.0"
description = "bf16, with limits for fp8 in blocks."
dtypes = ["bfloat16"]
min_coverage = 0.9
min_tokens = 32

[[limits]]
id = "fp8-mean"
metric = "mean_abs_dlogp"
quantisation = "fp8-block"
fail = {fail}
why = "What blocks of fp8 do to log-probs."
source = "measured: a test"

[[limits]]
id = "bits"
metric = "bit_mismatches"
fail = 100000
why = "Of the edges without quantisation."
source = "derived: no limit"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("fp8")
    write_fp8(here / "fp8", MODEL)
    lines = (f'{{"id": "{i}", "ids": {[7 * i + k * k for k in range(1, 9)]}}}' for i in range(1, 5))
    (here / "prompts.jsonl").write_text("\n".join(lines))
    return here


@pytest.fixture(scope="module")
def cli(folder: Path) -> Cli:
    return command_line(folder)


def compared(cli: Cli, folder: Path, rollout: str, train: str, *more: Any) -> Outcome:
    for spec in (rollout, train):
        require_engine(spec.partition(":")[0])
    names = {"fp8": folder / "fp8"}
    return cli(
        "compare", "--model", MODEL, "--prompts", folder / "prompts.jsonl",
        "--max-new-tokens", 16, "--run-dir", folder / "run", "--fresh",
        "--rollout", rollout.format(**names), "--train", train.format(**names), *more,
        env={"PYTHONPATH": str(Path(__file__).parent)},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rollout", "train", "weights"),
    [
        ("hf:model={fp8}", "hf", "quantised on the rollout side"),
        ("hf", "fsdp:dp=2,model={fp8}", "quantised on the training side"),
        (KERNELS, "hf", "quantised on the rollout side"),
        (KERNELS, "hf:model={fp8}", "equal"),
    ],
)
def test_a_quantised_side_is_judged_by_its_own_weights(
    cli: Cli, folder: Path, rollout: str, train: str, weights: str
) -> None:
    done = compared(cli, folder, rollout, train)
    verdict = done.verdict
    assert verdict is not None, done.err
    assert verdict["status"] == "pass"
    assert verdict["precheck"]["weights"] == weights
    assert "no operator beyond its budget on either side: 144 of 144" in done.out
    if weights != "equal":
        assert "the quantiser's image of the other side's weights, bit by bit, in 28" in " ".join(
            done.out.split()
        )
        assert "no limit of this contract judges" in " ".join(done.out.split())


@pytest.mark.parametrize(("fail", "status"), [(1.0, "pass"), (1e-6, "fail")])
def test_a_contract_may_limit_what_quantisation_does(
    cli: Cli, folder: Path, fail: float, status: str
) -> None:
    contract = folder / "fp8.toml"
    contract.write_text(CONTRACT.format(fail=fail))
    done = compared(cli, folder, "hf:model={fp8}", "hf", "--contract", contract)
    assert done.verdict is not None, done.err
    assert done.verdict["status"] == status
    judged = {(b["limit"], b["edge"]) for b in done.verdict["breaches"]}
    both = {("fp8-mean", "prefill_vs_train"), ("fp8-mean", "decode_vs_train")}
    assert judged == (both if status == "fail" else set())


@pytest.mark.parametrize("train", ["hf", "fsdp:dp=2", "fsdp:dp=2,mixed=0", "deepspeed:dp=2"])
def test_no_bit_differs_with_the_kernels(cli: Cli, folder: Path, train: str) -> None:
    how = f"{train}{',' if ':' in train else ':'}model={{fp8}},kernels=rlk"
    assert_equal(compared(cli, folder, KERNELS, how, "--contract", "bitwise"), 40)


def test_blocks_that_transformers_divides_evenly_are_named(cli: Cli, folder: Path) -> None:
    """192 rows in blocks of 128; transformers reads two blocks of 96."""
    usual = {"quantiser": quantise, "weight_block_size": [128, 128]}
    model = write_fp8(folder / "blocks of 128", MODEL, **usual)
    done = compared(cli, folder, f"hf:model={model}", "hf")
    assert done.code == 4
    said = " ".join(done.out.split())
    assert "are not those of its own checkpoint in 28 projections" in said
    assert "divides the rows and the columns evenly by the number of scales" in said


def test_scales_that_are_powers_of_two_are_named(cli: Cli, folder: Path) -> None:
    model = write_fp8(folder / "powers", MODEL, lambda w: quantise(w, BLOCK, powers_of_two=True))
    done = compared(cli, folder, f"hf:model={model}", "hf")
    assert done.code == 4
    assert "their scales are rounded up to powers of two" in " ".join(done.out.split())


def test_weights_that_were_changed_after_loading_are_named(cli: Cli, folder: Path) -> None:
    for train in ("hf", "hf:model={fp8}"):
        done = compared(cli, folder, "hf:model={fp8},patch=fp8_patches:one_weight_moved", train)
        assert done.code == 4
        said = " ".join(done.out.split())
        assert "own checkpoint in 1 projection (layers.1.up_proj): they were changed" in said


def test_vllm_names_the_module_that_a_substring_left_out(cli: Cli, folder: Path) -> None:
    model = write_fp8(
        folder / "left out", MODEL, left_out=("mlp.gate",), modules_to_not_convert=["mlp.gate"]
    )
    done = compared(cli, folder, f"vllm:model={model},kernels=rlk", "hf")
    assert done.code != 0
    assert "config.json lists 'mlp.gate' as not quantised, which is a part of this" in done.err
