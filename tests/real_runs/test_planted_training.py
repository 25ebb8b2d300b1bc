"""Faults planted into the training engines: each is named for what it is, before any number. Where
nothing is planted, nothing is named: `test_healthy_pairs.py`."""

from pathlib import Path
from typing import Any

import pytest
from command import Cli, Outcome, command_line, require_engine, write_few_prompts

TESTS = Path(__file__).parents[1]
PATCHES = {"PYTHONPATH": f"{TESTS / 'cli'}:{TESTS / 'engines'}"}
FLAGS = ("--max-new-tokens", 6, "--edges", "prefill_vs_train")


@pytest.fixture(scope="module")
def run_cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    return command_line(tmp_path_factory.mktemp("planted"))


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_few_prompts(tmp_path_factory.mktemp("prompts") / "few.jsonl")


@pytest.fixture(scope="module")
def healthy(run_cli: Cli, few: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rollout for all: HF, sampled and scored."""
    folder = tmp_path_factory.mktemp("healthy") / "rollout"
    done = run_cli("capture", "--engine", "hf", "-o", folder, "--prompts", few, *FLAGS[:2])
    assert done.code == 0, done.err
    return folder


@pytest.fixture
def against(run_cli: Cli, healthy: Path, few: Path):
    def compare(train: str, *more: object) -> Outcome:
        require_engine(train.partition(":")[0])
        done = run_cli(
            *("compare", "--rollout", f"replay:path={healthy}", "--train", train, *FLAGS),
            *("--prompts", few, *more),
            env=PATCHES,
        )
        assert done.verdict is not None, done.err
        return done

    return compare


def mismatches(done: Outcome) -> dict[str, dict[str, Any]]:
    """By name; a failed precheck ends the comparison before any number."""
    assert done.code == 4, done.out
    assert done.verdict["edges"] == {}
    assert done.verdict["divergence"] is None
    return {m["name"]: m for m in done.verdict["precheck"]["mismatches"]}


def test_swapped_heads_are_named(against) -> None:
    named = mismatches(against("megatron:tp=2,patch=megatron_patches:swap_two_heads"))
    assert list(named) == ["layers.1.q_proj"]
    # Both ranks' first two heads: 0, 1 of rank 0 and 4, 5 of rank 1.
    detail = named["layers.1.q_proj"]["detail"]
    assert "heads in another order: train's 0 hold the rollout's 1, 1 hold" in detail
    assert "4 hold the rollout's 5, 5 hold the rollout's 4" in detail


@pytest.mark.parametrize(
    ("engine", "patch"),
    [
        ("megatron:tp=2", "megatron_patches:stale_layer_on_rank_1"),
        ("fsdp:dp=2", "patches:stale_layer_on_rank_1"),
    ],
)
def test_a_stale_layer_names_the_rank(against, engine: str, patch: str) -> None:
    named = mismatches(against(f"{engine},patch={patch}"))
    ops = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj attn_norm mlp_norm q_norm k_norm"
    assert set(named) == {f"layers.2.{op}" for op in ops.split()}
    assert {tuple(m["ranks"]) for m in named.values()} == {(1,)}
    assert "rank 1" in named["layers.2.k_proj"]["detail"]


def test_shards_in_the_wrong_order_are_named(against) -> None:
    done = against("megatron:tp=2,patch=megatron_patches:shards_in_wrong_order")
    named = mismatches(done)
    assert list(named) == ["layers.1.o_proj"]
    assert named["layers.1.o_proj"]["ranks"] == [0, 1]
    assert "train's 0-3 hold the rollout's 4-7" in named["layers.1.o_proj"]["detail"]
    assert "train's 0-3 hold the rollout's 4-7" in " ".join(done.out.split())


@pytest.mark.parametrize(
    "train",
    [
        "megatron:patch=megatron_patches:positions_off_by_one",
        "fsdp:patch=patches:positions_off_by_one",
    ],
)
def test_positions_off_by_one_are_named(against, train: str) -> None:
    named = mismatches(against(train))
    assert list(named) == ["position"]
    where = named["position"]
    assert (where["sample"], where["position"], where["rollout"], where["train"]) == (0, 0, 0, 1)


def test_padding_on_the_other_side_is_named(run_cli: Cli, few: Path) -> None:
    done = run_cli(
        *("compare", "--rollout", "hf:batch=4,padding=left", "--prompts", few, *FLAGS),
        *("--train", "fsdp:batch=4,padding=right"),
    )
    named = mismatches(done)
    assert list(named) == ["padding_side"]
    assert (named["padding_side"]["rollout"], named["padding_side"]["train"]) == ("left", "right")


@pytest.mark.parametrize(
    "train",
    [
        "megatron:padding=left,patch=megatron_patches:ignore_padding",
        "fsdp:batch=4,padding=left,patch=patches:positions_count_padding",
    ],
)
def test_positions_that_count_padding_are_named(against, train: str) -> None:
    where = mismatches(against(train))["position"]
    assert where["rollout"] == where["position"] == 0
    assert where["train"] > 0, "the padding before the first token of a shorter sequence"


def test_a_wrong_boundary_is_named(against) -> None:
    named = mismatches(against("megatron:input=packed,patch=megatron_patches:wrong_boundary"))
    assert list(named) == ["sequence_boundary"]
    where = named["sequence_boundary"]
    assert (where["sample"], where["position"]) == (1, 0)
    assert (where["rollout"], where["train"]) == ("sees itself alone", "sees other tokens")


def test_processed_log_probs_against_raw_ones_are_named(against, run_cli: Cli, few: Path) -> None:
    named = mismatches(against("fsdp:temperature=0.7"))
    assert set(named) == {"temperature", "logprobs"}
    assert (named["logprobs"]["rollout"], named["logprobs"]["train"]) == ("raw", "processed")
    done = run_cli(
        *("compare", "--rollout", "hf:temperature=0.7", "--train", "fsdp:temperature=0.7"),
        *("--prompts", few, *FLAGS),
    )
    assert done.code == 0, done.out
    assert done.verdict["precheck"]["mismatches"] == []
