"""The embedded sparse model in the real engines: a planted fault is named with its side, and a
replay of routing splits the drift. Healthy pairs: `test_healthy_pairs.py`."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from command import Outcome, command_line, require_engine, write_few_prompts
from compared import compared as compare_few
from compared import named
from pair_models import SPARSE
from safetensors.torch import load_file, save_file

from rlk_align.engines.spec import EngineSpec
from rlk_align.selftest.fault_trials import SelfTestRequest, selftest
from rlk_align.selftest.faults.catalogue import FAULTS
from rlk_align.trace.run import Run

PATCHES = {"PYTHONPATH": str(Path(__file__).parent)}
FIRST, LAYER = "layers.1", "layers.2"


def compared(
    folder: Path, rollout: str, train: str, *more: object, model: Path = SPARSE
) -> Outcome:
    return compare_few(folder, rollout, train, "--model", model, *more, env=PATCHES)


def routing(done: Outcome, edge: str = "prefill_vs_train") -> dict[str, Any]:
    assert done.verdict is not None, done.err
    found: dict[str, Any] = done.verdict["routing"][edge]
    return found


@pytest.mark.parametrize(
    ("fault", "site"),
    [
        ("expert-flipped", "experts"),
        ("expert-weights-unnormalised", "routing_weights"),
        ("expert-weight-early", "act"),
        ("expert-token-dropped", "moe_out"),
        ("expert-missing", "moe_out"),
    ],
)
def test_a_fault_is_named(tmp_path: Path, fault: str, site: str) -> None:
    done = compared(tmp_path, "hf", f"hf:experts=grouped_mm,fault={fault}")
    assert done.code == 1, done.out + done.err
    assert named(done)[0] == (f"{LAYER}.{site}", "train")
    assert {side for _, side in named(done)} == {"train"}
    at_router = {layer["layer"]: layer["at_router"] for layer in routing(done)["layers"]}
    assert (at_router[2] > 0) == (fault == "expert-flipped")
    assert at_router[1] == at_router[3] == 0
    if fault == "expert-flipped":
        assert "beyond rounding" in " ".join(done.out.split())


@pytest.mark.parametrize("other", ["vllm", "megatron"])
def test_a_fault_at_an_operator_that_one_side_alone_shows(tmp_path: Path, other: str) -> None:
    faulty = "hf:experts=grouped_mm,fault=expert-weight-early"
    sides = ("vllm", faulty) if other == "vllm" else (faulty, other)
    done = compared(tmp_path, *sides)
    assert done.code == 1, done.out + done.err
    side = "train" if other == "vllm" else "rollout"
    assert named(done) == [(f"{LAYER}.act", side), (f"{LAYER}.moe_out", side)]


def test_a_fault_in_the_rollout_alone(tmp_path: Path) -> None:
    done = compared(tmp_path, "hf:fault=expert-weights-unnormalised", "hf")
    assert named(done) == [(f"{LAYER}.routing_weights", "rollout")]


@pytest.mark.parametrize(
    ("patch", "dtype", "wrong"),
    [
        ("one_at_a_time", "bfloat16", []),
        ("summed_in_bf16", "float32", [(f"{FIRST}.moe_out", "train")]),
        ("next_experts", "bfloat16", [(f"{FIRST}.moe_out", "train")]),
    ],
)
def test_rows_of_experts_in_another_order_are_not_blamed(
    tmp_path: Path, patch: str, dtype: str, wrong: list[tuple[str, str]]
) -> None:
    """They are not shown, and the sum is recomputed without them."""
    done = compared(tmp_path, f"hf:dtype={dtype}", f"hf:dtype={dtype},patch=sparse_faults:{patch}")
    assert done.code == bool(wrong), done.out + done.err
    assert named(done) == wrong
    assert done.verdict is not None
    coverage = done.verdict["coverage"]
    assert coverage["fraction"] == 1
    hidden = {u["site"] for u in coverage["unpaired"]}
    assert hidden == {f"{FIRST}.{op}" for op in ("gate_proj", "up_proj", "act", "down_proj")}
    assert "not compute their rows in the order that experts=grouped_mm prescribes" in " ".join(
        done.out.split()
    )


def test_a_router_in_bf16(tmp_path: Path) -> None:
    bf16 = "hf:dtype=float32,fault=router-bf16"
    done = compared(tmp_path, "hf:dtype=float32", bf16)
    assert named(done)[0] == (f"{LAYER}.router", "train")


@pytest.mark.parametrize("kernels", ["", "kernels=rlk,"])
def test_faults_inside_other_engines(tmp_path: Path, kernels: str) -> None:
    """On both sides at once, each named with its own."""
    done = compared(
        tmp_path,
        f"vllm:{kernels}fault=expert-flipped",
        f"megatron:{kernels}fault=expert-token-dropped",
    )
    assert done.code == 1, done.out + done.err
    assert named(done) == [(f"{LAYER}.experts", "rollout"), (f"{LAYER}.moe_out", "train")]


def test_experts_in_another_order_are_told_before_any_number(tmp_path: Path) -> None:
    done = compared(tmp_path, "hf", "hf:fault=experts-shuffled")
    assert done.code == 4, done.out
    assert done.verdict is not None
    mismatches = {m["name"] for m in done.verdict["precheck"]["mismatches"]}
    wanted = {f"{LAYER}.experts.{e}.{op}" for e in (0, 1) for op in ("gate_proj", "up_proj")}
    assert mismatches == wanted
    assert f"train holds what the rollout holds as {LAYER}.experts.1.gate_proj" in done.out


def with_tied_experts(folder: Path) -> Path:
    """The sparse model, two of whose experts have one row of the router."""
    tied = folder / "tied"
    shutil.copytree(SPARSE, tied)
    tensors = load_file(tied / "model.safetensors")
    gate = tensors[f"model.{LAYER}.mlp.gate.weight"]
    gate[5] = gate[2]
    save_file(tensors, tied / "model.safetensors", metadata={"format": "pt"})
    return tied


def test_a_tie_is_no_bug(tmp_path: Path) -> None:
    """Two experts have one row of the router: the engines may choose either."""
    tied = with_tied_experts(tmp_path)
    done = compared(tmp_path, "hf", "hf:fault=expert-tie", model=tied)
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


@pytest.mark.parametrize(
    "engine",
    [
        *("hf", "megatron:ep=2,pp=2", "vllm", "vllm:kernels=rlk"),
        *(
            pytest.param(engine, marks=pytest.mark.whole_matrix)
            for engine in (
                *("hf:experts=eager,batch=4", "megatron"),
                *("hf:kernels=rlk,batch=4", "megatron:kernels=rlk,ep=2,pp=2"),
                *("vllm:tp=2", "vllm:tp=2,kernels=rlk"),
            )
        ),
    ],
)
def test_replay_takes_away_what_routing_alone_has_done(tmp_path: Path, engine: str) -> None:
    """Two captures of one engine that differ in the experts of tied tokens alone: with the experts
    of the first, the second gives the log-probs of the first, bit for bit."""
    require_engine(engine.partition(":")[0])
    few = write_few_prompts(tmp_path / "few.jsonl")
    cli, tied = command_line(tmp_path), with_tied_experts(tmp_path)
    # The kernels do not choose by `torch.topk`, and a replay stands behind their faults.
    patch = "patch=sparse_faults:last_of_ties_by_top_k"
    patch = "fault=expert-tie" if "kernels" in engine else patch
    specs = {
        "sampled": "hf",
        "own": engine,
        "other": f"{engine}{',' if ':' in engine else ':'}{patch}",
    }
    for name, spec in specs.items():
        ids = ["--tokens", tmp_path / "sampled"]
        ids = ["--prompts", few, "--max-new-tokens", 8] if name == "sampled" else ids
        flags = ("--engine", spec, "--model", tied, "-o", tmp_path / name)
        done = cli("capture", *flags, *ids, env=PATCHES)
        assert done.code == 0, done.err
    edges = ("--edges", "prefill_vs_train", "--run-dir", tmp_path / "run")
    done = cli(
        "compare", tmp_path / "own", tmp_path / "other", *edges, "--replay-routing", env=PATCHES
    )
    assert done.verdict is not None, done.err
    found = routing(done)
    assert found["layers"][1]["ties"] > 0
    assert done.verdict["edges"]["prefill_vs_train"]["bit_mismatches"] > 0
    replay = found["replay"]
    assert replay["rest"]["bit_mismatches"] == 0
    assert replay["rest"]["max_abs_dlogp"] == 0
    whole = done.verdict["edges"]["prefill_vs_train"]["max_abs_dlogp"]
    assert replay["routing"]["max_abs_dlogp"] == whole > 0
    assert replay["rows"] == sum(layer["rows"] for layer in found["layers"])
    assert "replayed (prefill_vs_train): with the other side's experts in train" in done.out


def test_replay_in_a_pair(tmp_path: Path) -> None:
    """By `compare` as by `probe`, with the parts in its JSON and its page; a replay that a patch
    thwarts is an error, and a dense model has no routing to replay."""
    page = tmp_path / "page.html"
    done = compared(tmp_path, "hf", "megatron", "--replay-routing", "--output", f"html={page}")
    assert done.code == 0, done.out + done.err
    replay = routing(done)["replay"]
    edge = done.verdict["edges"]["prefill_vs_train"] if done.verdict else {}
    assert replay["side"] == "train"
    assert replay["routing"]["max_abs_dlogp"] > 0
    assert replay["rest"]["tokens"] == replay["routing"]["tokens"] == edge["tokens"]
    # Token by token the parts add up, and so their means do.
    total = replay["rest"]["k1"] + replay["routing"]["k1"]
    assert total == pytest.approx(edge["k1"], rel=1e-9, abs=1e-12)
    html = page.read_text(encoding="utf-8")
    assert "Drift with routing and without" in html
    assert "Flips by layer, prefill_vs_train" in html
    again = command_line(tmp_path)("probe", tmp_path / "run", "--replay-routing")
    assert again.code == 0, again.err
    assert routing(again)["replay"] == replay
    thwarted = compared(tmp_path, "hf", "hf:attn=eager,fault=expert-flipped", "--replay-routing")
    assert thwarted.code == 3, thwarted.out
    assert "were not computed by the replayed experts" in thwarted.err
    dense = command_line(tmp_path)(
        "compare", "--rollout", "hf", "--train", "hf", "--replay-routing"
    )
    assert dense.code == 2
    assert "the model has no sparse layers" in dense.err


@pytest.mark.whole_matrix
def test_the_self_test_names_every_fault_of_a_sparse_layer(tmp_path: Path) -> None:
    """In all engines, on either side of each pair, beside the one that HF alone shows."""
    for engine in ("vllm", "megatron"):
        require_engine(engine)
    names = {name for name, fault in FAULTS.items() if fault.sparse}
    few = write_few_prompts(tmp_path / "few.jsonl")
    planted = {"hf,vllm,megatron": names - {"expert-weight-early"}, "hf": {"expert-weight-early"}}
    for engines, faults in planted.items():
        done = command_line(tmp_path)(
            *("selftest", "--engines", engines, "--faults", ",".join(sorted(faults))),
            *("--model", SPARSE, "--prompts", few, "--run-dir", tmp_path / "selftest"),
            *("--seeds", 1),
            *("--output", f"json={tmp_path / 'out.json'}"),
            shared=False,
        )
        found = json.loads((tmp_path / "out.json").read_text())
        assert done.code == 0, done.out
        assert {d["fault"] for d in found["detections"]} == faults
        assert all(d["others"] == [] for d in found["detections"])
        assert [c["alarms"] for c in found["clean"]] == [[]] * len(found["clean"])


@pytest.mark.whole_matrix
def test_the_self_test_with_the_kernels(tmp_path: Path) -> None:
    """In all engines, on either side of each pair, beside the one in a product of transformers."""
    engines = tuple(EngineSpec.parse(f"{e}:kernels=rlk") for e in ("hf", "vllm", "megatron"))
    for engine in engines:
        require_engine(engine.name)
    faults = tuple(n for n, f in FAULTS.items() if f.sparse and n != "expert-weight-early")
    request = SelfTestRequest(
        engines=engines,
        faults=faults,
        seeds=1,
        curves=False,
        model=str(SPARSE),
        prompts=write_few_prompts(tmp_path / "few.jsonl"),
    )
    report = selftest(request, Run(tmp_path), lambda *_: None, lambda _: None)
    assert report.passed
    assert len(report.detections) == 6 * len(faults)
    assert all(d.others == [] for d in report.detections)
    assert [c.alarms for c in report.clean] == [[]] * 3


def test_graft_passes_are_left_out_with_the_reason(tmp_path: Path) -> None:
    assert compared(tmp_path, "hf", "hf:attn=eager").code == 0
    done = command_line(tmp_path)("probe", tmp_path / "run")
    assert done.code == 0, done.err
    assert "graft passes omitted: " in done.out
    assert "sparse layers" in done.out


def test_what_does_not_run_is_refused(tmp_path: Path) -> None:
    done = compared(tmp_path, "hf", "megatron:tp=2")
    assert done.code == 2, done.err
    assert "tp=2 does not support sparse layers" in done.err
    assert "with ep=2 the ranks share the experts" in done.err


@pytest.mark.parametrize("kernels", ["off", "rlk"])
def test_what_a_patch_makes_of_a_routers_output_is_named_there(
    tmp_path: Path, kernels: str
) -> None:
    train = f"hf:kernels={kernels},patch=sparse_faults:weighed_too_much"
    done = compared(tmp_path, f"hf:kernels={kernels}", train)
    assert named(done) == [(f"{FIRST}.routing_weights", "train")]
