"""One of several ranks has a fault, or does not run a kernel: the rank is named, in vLLM and
Megatron."""

import re
from pathlib import Path
from typing import Any

import pytest
from command import Cli, Outcome, require_engine, write_few_prompts

from rlk_align.data import data_path

PATCHES = Path(__file__).resolve().parents[1] / "cli"
whole_matrix = pytest.mark.whole_matrix
SHARED = ("vllm:tp=2", "megatron:tp=2")


@pytest.fixture(scope="module")
def run(folder: Path, cli: Cli) -> Any:
    prompts = write_few_prompts(folder / "few.jsonl")

    def against_hf(engine: str, *more: object, **environment: str) -> Outcome:
        require_engine(engine.partition(":")[0])
        side = "--rollout" if engine.startswith("vllm") else "--train"
        other = "--train" if side == "--rollout" else "--rollout"
        return cli(
            *("compare", "--model", data_path("model"), "--prompts", prompts),
            *(side, f"{engine},kernels=rlk", other, "hf:kernels=rlk", "--max-new-tokens", 4),
            *("--contract", "bitwise", "--run-dir", folder / "run", *more),
            env={"PYTHONPATH": str(PATCHES)} | environment,
            shared=False,
        )

    return against_hf


def named(done: Outcome) -> tuple[str, dict[str, list[int]]]:
    assert done.code == 1, done.out + done.err
    assert done.verdict is not None
    first = done.verdict["divergences"]["prefill_vs_train"]["first_bitwise"]
    return first["site"], first["ranks"]


@whole_matrix
@pytest.mark.parametrize("engine", SHARED)
@pytest.mark.parametrize(
    ("fault", "site"),
    [
        # A value that is whole on each rank, features that are divided among ranks, and a weight.
        ("norm-eps", "layers.0.attn_norm"),
        ("attn-scale", "layers.3.attn"),
        ("residual-fp8", "layers.0.attn_residual"),
    ],
)
def test_a_fault_on_one_rank_is_named_with_it(run: Any, engine: str, fault: str, site: str) -> None:
    done = run(f"{engine},fault={fault}@rank1")
    side = "rollout" if engine.startswith("vllm") else "train"
    assert named(done) == (site, {side: [1]})
    assert f"the differing values are on rank 1 of {side}" in done.out


@whole_matrix
@pytest.mark.parametrize("layout", ["tp=2", "tp=2,sp=1"])
def test_a_fault_on_every_rank_is_the_fault_of_one(cli: Cli, folder: Path, layout: str) -> None:
    """Faults apply to whole operators: on two ranks a fault has the same bits as on one."""
    require_engine("megatron")
    prompts = ("--prompts", write_few_prompts(folder / "few.jsonl"), "--max-new-tokens", 4)

    def captured(name: str, engine: str, *more: object) -> Path:
        run = folder / f"{name}-{layout}"
        done = cli("capture", "--engine", engine, *more, "-o", run, shared=False)
        assert done.code == 0, done.err
        return run

    tokens = captured("tokens", "hf:kernels=rlk", *prompts)
    fault = "kernels=rlk,fault=proj-input-fp8"
    runs = [
        captured(name, f"megatron:{options}{fault}", "--tokens", tokens)
        for name, options in (("one", ""), ("two", f"{layout},"))
    ]
    done = cli("compare", *runs, "--contract", "bitwise", "--edges", "prefill_vs_train")
    assert done.code == 0, done.out + done.err
    assert done.verdict is not None
    assert done.verdict["coverage"]["paired"] > 1000


@whole_matrix
@pytest.mark.parametrize("engine", SHARED)
def test_a_weight_on_one_rank_is_named_by_the_precheck(run: Any, engine: str) -> None:
    done = run(f"{engine},fault=weight-norm@rank1")
    assert done.code == 4, done.out + done.err
    assert done.verdict is not None
    (mismatch,) = done.verdict["precheck"]["mismatches"]
    assert (mismatch["name"], mismatch["ranks"]) == ("layers.3.mlp_norm", [1])


@whole_matrix
@pytest.mark.parametrize("engine", SHARED)
def test_a_kernel_that_one_rank_does_not_call_is_an_error_with_the_rank(
    run: Any, engine: str
) -> None:
    done = run(f"{engine},patch=patches:own_norm_on_rank_1")
    assert done.code == 3, done.out + done.err
    assert "layers.1.attn_norm and were not called on rank 1" in done.err


@whole_matrix
def test_what_the_kernels_refuse_in_a_rank_is_said_in_their_words(run: Any) -> None:
    """The message of vLLM itself is that a worker failed to start."""
    done = run("vllm:tp=2", VLLM_BATCH_INVARIANT="1")
    assert done.code == 2, done.out + done.err
    assert "does not support VLLM_BATCH_INVARIANT=1" in done.err
    assert "leave kernels=rlk out" in done.err


@whole_matrix
def test_a_probe_grafts_into_every_rank(cli: Cli, folder: Path) -> None:
    """vLLM computes an addition and a norm in one operator, so a stage also overwrites its
    input."""
    require_engine("vllm")
    require_engine("megatron")
    done = cli(
        *("probe", "--model", data_path("model"), "--rollout", "vllm"),
        *("--prompts", write_few_prompts(folder / "few.jsonl"), "--max-new-tokens", 8),
        *("--train", "megatron:cp=2,pp=2,fault=norm-eps", "--run-dir", folder / "probed"),
    )
    assert done.code == 1, done.out + done.err
    assert done.first == "layers.0.attn_norm"
    # The other operators introduce differences within rounding.
    assert re.search(r"introducers: [0-9]+, 1 beyond their budgets", done.out)
    assert re.search(r"layers\.0\.attn_norm +train", done.out)
