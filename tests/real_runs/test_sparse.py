"""The embedded sparse model in the real engines: healthy pairs raise no alarm, and a planted fault
is named with its side."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome, command_line, require_engine, write_few_prompts
from safetensors.torch import load_file, save_file

SPARSE = Path(__file__).parents[2] / "fixtures/sparse"
PATCHES = {"PYTHONPATH": str(Path(__file__).parent)}
LAYER = "layers.2"


def compared(
    folder: Path, rollout: str, train: str, *more: object, model: Path = SPARSE
) -> Outcome:
    few = write_few_prompts(folder / "few.jsonl")
    return command_line(folder)(
        *("compare", "--model", model, "--prompts", few, "--max-new-tokens", 8),
        *("--run-dir", folder / "run", "--rollout", rollout, "--train", train, *more),
        env=PATCHES,
    )


def named(done: Outcome, edge: str = "prefill_vs_train") -> list[tuple[str, str]]:
    """The operators over their budgets, in execution order, with their sides."""
    assert done.verdict is not None, done.err
    return [(o["site"], o["side"]) for o in done.verdict["divergences"][edge]["over_budget"]]


def routing(done: Outcome, edge: str = "prefill_vs_train") -> dict[str, Any]:
    assert done.verdict is not None, done.err
    found: dict[str, Any] = done.verdict["routing"][edge]
    return found


@pytest.mark.parametrize(
    ("rollout", "train"),
    [
        ("vllm", "megatron"),
        ("vllm", "hf"),
        ("hf:experts=eager", "megatron:dispatcher=alltoall"),
        ("hf:experts=batched_mm", "hf:batch=4"),
        ("hf", "fsdp:dp=2"),
    ],
)
def test_a_healthy_pair(tmp_path: Path, rollout: str, train: str) -> None:
    for engine in (rollout, train):
        require_engine(engine.partition(":")[0])
    done = compared(tmp_path, rollout, train)
    assert done.code == 0, done.out + done.err
    assert named(done) == []
    coverage = done.verdict["coverage"] if done.verdict else {}
    assert coverage["fraction"] == 1
    hidden = {u["site"].rpartition(".")[2] for u in coverage["unpaired"]}
    first = {"gate_proj", "up_proj"} if "vllm" in (rollout, train) else set()
    assert hidden == first | ({"act", "down_proj"} if first or "megatron" in train else set())
    found = routing(done)
    assert [layer["layer"] for layer in found["layers"]] == [1, 2, 3]
    assert all(layer["largest_gap"] <= 5 for layer in found["layers"])
    assert found["flipped_tokens"] < 0.1 * found["tokens"]
    assert "routing (prefill_vs_train): " in done.out


@pytest.mark.parametrize(
    ("fault", "site"),
    [
        ("flipped_expert", "experts"),
        ("unnormalised", "routing_weights"),
        ("weight_before_activation", "act"),
        ("dropped_token", "moe_out"),
    ],
)
def test_a_fault_is_named(tmp_path: Path, fault: str, site: str) -> None:
    done = compared(tmp_path, "hf", f"hf:patch=sparse_faults:{fault}")
    assert done.code == 1, done.out + done.err
    assert named(done)[0] == (f"{LAYER}.{site}", "train")
    assert {side for _, side in named(done)} == {"train"}
    at_router = {layer["layer"]: layer["at_router"] for layer in routing(done)["layers"]}
    assert (at_router[2] > 0) == (fault == "flipped_expert")
    assert at_router[1] == at_router[3] == 0
    if fault == "flipped_expert":
        assert "beyond rounding" in done.out


def test_a_fault_in_the_rollout_alone(tmp_path: Path) -> None:
    done = compared(tmp_path, "hf:patch=sparse_faults:unnormalised", "hf")
    assert named(done) == [(f"{LAYER}.routing_weights", "rollout")]


def test_a_router_in_bf16(tmp_path: Path) -> None:
    bf16 = "hf:dtype=float32,patch=sparse_faults:router_in_bf16"
    done = compared(tmp_path, "hf:dtype=float32", bf16)
    assert named(done)[0] == (f"{LAYER}.router", "train")


def test_faults_inside_other_engines(tmp_path: Path) -> None:
    """On both sides at once, each named with its own."""
    require_engine("vllm")
    require_engine("megatron")
    done = compared(
        tmp_path,
        "vllm:patch=sparse_faults:flipped_expert_in_vllm",
        "megatron:patch=sparse_faults:dropped_token_in_megatron",
    )
    assert done.code == 1, done.out + done.err
    assert named(done) == [(f"{LAYER}.experts", "rollout"), (f"{LAYER}.moe_out", "train")]


def test_experts_in_another_order_are_told_before_any_number(tmp_path: Path) -> None:
    done = compared(tmp_path, "hf", "hf:patch=sparse_faults:shuffled_experts")
    assert done.code == 4, done.out
    assert done.verdict is not None
    mismatches = {m["name"] for m in done.verdict["precheck"]["mismatches"]}
    wanted = {f"{LAYER}.experts.{e}.{op}" for e in (0, 1) for op in ("gate_proj", "up_proj")}
    assert mismatches == wanted
    assert f"train holds what the rollout has as {LAYER}.experts.1.gate_proj" in done.out


def test_a_tie_is_no_bug(tmp_path: Path) -> None:
    """Two experts with one router row: which of them is taken nobody has to agree on."""
    tied = tmp_path / "tied"
    shutil.copytree(SPARSE, tied)
    tensors = load_file(tied / "model.safetensors")
    gate = tensors[f"model.{LAYER}.mlp.gate.weight"]
    gate[5] = gate[2]
    save_file(tensors, tied / "model.safetensors", metadata={"format": "pt"})
    done = compared(tmp_path, "hf", "hf:patch=sparse_faults:last_of_ties", model=tied)
    assert named(done) == []
    layer = routing(done)["layers"][1]
    assert layer["at_router"] == layer["flipped"] == layer["ties"] == layer["measured"] > 0
    assert "ties of logits" in done.out
    sites = json.loads((tmp_path / "run/comparison.json").read_text())["edges"]
    rows = {s["site"]: s for s in sites[1]["sites"]}
    assert rows[f"{LAYER}.experts"]["differ"] == layer["flipped"]
    # The expert that both sides take is compared, and equal; no row of another is.
    assert rows[f"{LAYER}.gate_proj"]["differ"] == 0
    assert rows[f"{LAYER}.moe_out"]["introduced"] == 0


def test_graft_passes_are_left_out_with_the_reason(tmp_path: Path) -> None:
    assert compared(tmp_path, "hf", "hf:attn=eager").code == 0
    done = command_line(tmp_path)("probe", tmp_path / "run")
    assert done.code == 0, done.err
    assert "graft passes left out: " in done.out
    assert "sparse layers" in done.out


def test_what_does_not_run_is_refused(tmp_path: Path) -> None:
    done = compared(tmp_path, "hf", "megatron:tp=2")
    assert done.code == 2, done.err
    assert "does not take sparse layers" in done.err
