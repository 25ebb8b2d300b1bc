"""GLM-4.5's sparse layers in the real engines: scores of a sigmoid that are corrected for the
choice, groups of experts, and shared experts. Healthy pairs raise no alarm, and what is wrong is
named with its side."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Outcome, command_line, require_engine, write_few_prompts
from compared import compared as compare_few
from compared import named
from pair_models import CORRECTED
from random_model import write_random_model
from safetensors.torch import load_file, save_file
from stacked_experts import stacked

PATCHES = {"PYTHONPATH": str(Path(__file__).parent)}
GROUPED: dict[str, Any] = CORRECTED | {"model_type": "glm4_moe", "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("glm") / "grouped", **GROUPED)


def compared(folder: Path, model: Path, rollout: str, train: str, *more: object) -> Outcome:
    return compare_few(folder, rollout, train, "--model", model, *more, env=PATCHES)


def check_healthy(done: Outcome) -> None:
    assert done.code == 0, done.out + done.err
    assert named(done) == []
    assert done.verdict is not None
    coverage = done.verdict["coverage"]
    assert coverage["fraction"] == 1
    inside = {"gate_proj", "up_proj", "act", "down_proj"}
    assert {u["site"].rpartition(".")[2] for u in coverage["unpaired"]} <= inside
    routing = done.verdict["routing"]["prefill_vs_train"]
    assert [layer["layer"] for layer in routing["layers"]] == [1, 2]
    assert all(layer["largest_gap"] <= 5 for layer in routing["layers"])


@pytest.mark.parametrize(
    ("rollout", "train"),
    [
        ("hf:experts=eager", "megatron:ep=2,dispatcher=alltoall"),
        pytest.param(
            "hf:experts=batched_mm", "megatron:pp=3,input=packed", marks=pytest.mark.whole_matrix
        ),
    ],
)
def test_a_healthy_pair(tmp_path: Path, model: Path, rollout: str, train: str) -> None:
    """Layouts that the kernels do not have; the others: `test_healthy_pairs.py`."""
    check_healthy(compared(tmp_path, model, rollout, train))


@pytest.mark.whole_matrix
@pytest.mark.parametrize(("rollout", "train"), [("vllm", "megatron:ep=2"), ("hf", "fsdp:dp=2")])
def test_experts_stored_as_one_tensor_a_layer(
    tmp_path: Path, model: Path, rollout: str, train: str
) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for file in model.glob("*.safetensors"):
        tensors |= load_file(file)
    (tmp_path / "stacked").mkdir()
    save_file(stacked(tensors), tmp_path / "stacked/model.safetensors", {"format": "pt"})
    for file in model.glob("*.json"):
        if "index" not in file.name:
            shutil.copy(file, tmp_path / "stacked")
    check_healthy(compared(tmp_path, tmp_path / "stacked", rollout, train))


@pytest.mark.parametrize(
    ("fault", "site"),
    [
        ("expert-flipped", "experts"),
        pytest.param(
            "expert-weights-unnormalised", "routing_weights", marks=pytest.mark.whole_matrix
        ),
        pytest.param("expert-token-dropped", "moe_out", marks=pytest.mark.whole_matrix),
        pytest.param("expert-missing", "moe_out", marks=pytest.mark.whole_matrix),
        ("shared-expert-weak", "shared_down_proj"),
    ],
)
@pytest.mark.parametrize("engine", ["vllm", "megatron"])
def test_a_fault_is_named(tmp_path: Path, model: Path, engine: str, fault: str, site: str) -> None:
    pair = ("vllm", "hf") if engine == "vllm" else ("hf", "megatron")
    specs = [f"{e}:fault={fault}" if e == engine else e for e in pair]
    done = compared(tmp_path, model, *specs)
    assert done.code == 1, done.out + done.err
    assert named(done)[0] == (f"layers.2.{site}", "rollout" if engine == "vllm" else "train")


def test_a_router_in_bf16(tmp_path: Path, model: Path) -> None:
    done = compared(tmp_path, model, "hf:dtype=float32", "hf:dtype=float32,fault=router-bf16")
    assert named(done)[0] == ("layers.2.router", "train")


def test_a_choice_without_the_correction(tmp_path: Path, model: Path) -> None:
    done = compared(tmp_path, model, "hf", "hf:patch=sparse_faults:uncorrected")
    assert done.code == 1, done.out + done.err
    assert named(done)[0] == ("layers.1.experts", "train")
    assert done.verdict is not None
    first, _ = done.verdict["routing"]["prefill_vs_train"]["layers"]
    assert first["at_router"] == first["flipped"] == first["measured"] > 0
    assert "beyond rounding" in " ".join(done.out.split())


@pytest.mark.whole_matrix
@pytest.mark.parametrize(
    ("patch", "setting", "site"),
    [
        ("all_groups", "expert_groups_chosen", "experts"),
        ("unscaled", "expert_weight_scale", "routing_weights"),
    ],
)
def test_another_setting_is_told_by_the_precheck_and_by_the_operator(
    tmp_path: Path, model: Path, patch: str, setting: str, site: str
) -> None:
    train = f"hf:patch=sparse_faults:{patch}"
    done = compared(tmp_path, model, "hf", train)
    assert done.code == 4, done.out
    assert done.verdict is not None
    assert {m["name"] for m in done.verdict["precheck"]["mismatches"]} == {setting}
    anyway = compared(tmp_path, model, "hf", train, "--allow-mismatch", "attributes")
    assert named(anyway)[0] == (f"layers.1.{site}", "train")


@pytest.mark.whole_matrix
@pytest.mark.parametrize("engine", ["hf", "megatron", "vllm"])
def test_replay_gives_the_recorded_experts(tmp_path: Path, model: Path, engine: str) -> None:
    """What is left with the other side's experts and what routing does add up to the drift."""
    require_engine(engine)
    cli, few = command_line(tmp_path), write_few_prompts(tmp_path / "few.jsonl")
    first = ("--prompts", few, "--max-new-tokens", 8)
    for name, spec, ids in (
        ("recorded", "hf:patch=sparse_faults:uncorrected", first),
        ("scored", engine, ("--tokens", tmp_path / "recorded")),
    ):
        flags = ("--engine", spec, "--model", model, "-o", tmp_path / name)
        done = cli("capture", *flags, *ids, env=PATCHES)
        assert done.code == 0, done.err
    done = cli(
        *("compare", tmp_path / "recorded", tmp_path / "scored", "--replay-routing"),
        *("--edges", "prefill_vs_train", "--run-dir", tmp_path / "run"),
        env=PATCHES,
    )
    assert done.verdict is not None, done.err
    found = done.verdict["routing"]["prefill_vs_train"]
    replay, edge = found["replay"], done.verdict["edges"]["prefill_vs_train"]
    assert replay["rows"] == sum(layer["rows"] for layer in found["layers"])
    assert found["flipped_tokens"] > 0.5 * found["tokens"]
    assert replay["rest"]["mean_abs_dlogp"] < 0.2 * edge["mean_abs_dlogp"]
    total = replay["rest"]["k1"] + replay["routing"]["k1"]
    assert total == pytest.approx(edge["k1"], rel=1e-9, abs=1e-12)


def test_what_megatron_computes_otherwise_is_refused(tmp_path: Path, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    for changes, said in (
        ({"norm_topk_prob": False}, "norm_topk_prob=false"),
        ({"num_experts_per_tok": 2}, "it adds up the best 1 scores of a group where the model"),
    ):
        changed = tmp_path / said[:4]
        changed.mkdir()
        for file in model.iterdir():
            (changed / file.name).symlink_to(file)
        (changed / "config.json").unlink()
        (changed / "config.json").write_text(json.dumps(config | changes))
        done = compared(tmp_path, changed, "hf", "megatron")
        assert done.code == 2, done.out
        assert said in done.err
