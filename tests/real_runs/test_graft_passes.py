"""Graft passes of the real engines: each reproduces its own capture bit for bit, and what is
computed alike on both sides is clean, so that a planted fault is the only introducer.
"""

import functools
from pathlib import Path

import pytest
import warm
from command import require_engine
from compared import compared

from rlk_align.capture import supervise
from rlk_align.errors import BadOption
from rlk_align.probe.attribute import attribute
from rlk_align.probe.decompose import decompose
from rlk_align.probe.graft import GraftedEdge, graft_passes
from rlk_align.probe.perturbation import amplification
from rlk_align.probe.unit_record import Unit
from rlk_align.results import EdgeName
from rlk_align.trace.run import Run

PATCHES = {"PYTHONPATH": str(Path(__file__).parents[1] / "cli")}
EDGES: tuple[EdgeName, ...] = ("decode_vs_prefill", "prefill_vs_train", "decode_vs_train")


@pytest.fixture(autouse=True)
def _warm(monkeypatch: pytest.MonkeyPatch) -> None:
    started = functools.partial(warm.start_worker, supervise.start_process)
    monkeypatch.setattr(supervise, "start_process", started)
    monkeypatch.setenv("PYTHONPATH", PATCHES["PYTHONPATH"])


def run_of(folder: Path, rollout: str, train: str) -> Run:
    done = compared(folder, rollout, train, new_tokens=6, env=PATCHES)
    assert done.code in (0, 1), done.err
    return Run.open(str(folder / "run"))


def units(edge: GraftedEdge) -> dict[str, Unit]:
    found = {u.name: u for u in decompose(edge, lambda *_: None)}
    for unit in found.values():
        assert unit.label != "undetermined", unit.reason
        assert all(o.rows and not o.left_out for o in unit.orders), unit
    return found


def introducers(edge: GraftedEdge) -> set[str]:
    return {name for name, u in units(edge).items() if u.label == "introducer"}


def operators(names: set[str]) -> set[str]:
    return {n.rpartition(".")[2] for n in names}


@pytest.mark.whole_matrix
def test_hf_and_fsdp(tmp_path: Path) -> None:
    """A fault of decode alone on one side, one in a norm on the other; decode and prefill may
    attend by other kernels."""
    run = run_of(tmp_path, "hf:patch=patches:decode_only", "fsdp:dp=2,patch=patches:scale_key_norm")
    edges = graft_passes(run, EDGES, lambda *_: None)
    decode, prefill, across = map(introducers, edges)
    assert prefill == {"layers.1.k_norm"}
    kernels = {"attn", "logprob"}
    assert operators(decode - {"layers.1.o_proj"}) <= kernels
    assert "layers.1.o_proj" in decode
    assert across >= {"layers.1.o_proj", "layers.1.k_norm"}
    assert operators(across - {"layers.1.o_proj", "layers.1.k_norm"}) <= kernels
    # A norm of a whole per cent: the sizes are those of the fault.
    planted = units(edges[1])["layers.1.k_norm"].part("introduced")
    assert planted is not None
    assert 0.008 < planted.rel_l2 < 0.012
    folders = {p.name.partition(".")[0]: p for p in run.folder.glob("captures/*.probe-*")}
    forwards = {role: len(list(p.glob("*/pass.json"))) for role, p in folders.items()}
    assert forwards == {"rollout": 6, "train": 3}
    # The only introducer is the whole of the difference, first or last.
    attribution = attribute(run, edges[0], list(units(edges[0]).values()), lambda *_: None)
    assert attribution.unexplained == 0
    assert max(map(abs, attribution.whole)) > 1e-4
    assert attribution.largest is not None
    assert attribution.largest.units == ["layers.1.o_proj"]
    if len(attribution.layers) == 1:
        assert attribution.layers[0].first == attribution.layers[0].last == attribution.whole

    # Once more: what is there is taken as it is, and no engine starts.
    again: list[str] = []
    graft_passes(run, EDGES[:1], lambda stage, *_: again.append(stage))
    assert again == []


def test_an_early_ulp_that_becomes_the_largest_difference_late(tmp_path: Path) -> None:
    """In fp32 the planted unit alone is an introducer; what differs most is a late amplifier. An
    engine's answer to a perturbation of its own has the same shape."""
    run = run_of(
        tmp_path, "hf:dtype=float32", "hf:dtype=float32,patch=patches:ulp_in_the_first_norm"
    )
    (edge,) = graft_passes(run, EDGES[1:2], lambda *_: None)
    by_site = units(edge)
    assert introducers(edge) == {"layers.0.attn_norm"}
    planted = by_site["layers.0.attn_norm"].part("introduced")
    assert planted is not None
    assert 2e-8 < planted.rel_l2 < 1.2e-7
    largest = max(by_site.values(), key=lambda u: _inherited(u))
    assert largest.label == "amplifier"
    assert largest.layer is None or largest.layer >= 2
    assert _inherited(largest) > 2 * planted.rel_l2
    answer = amplification(run, "rollout", "layers.0.attn_norm", lambda *_: None)
    assert 2e-8 < answer.rel_l2 < 1.2e-7
    assert answer.gain > 1.5
    assert answer.largest is not None
    assert answer.largest.gain > 1
    responses = {r.name: r for r in answer.responses}
    assert not {"embed", "layers.0.attn_norm"} & responses.keys()
    assert responses["layers.0.q_proj"].inputs_rel_l2 == answer.rel_l2
    assert responses["logits"].rel_l2 > 0
    assert answer.max_abs_dlogp > 0
    with pytest.raises(BadOption, match="'nothing' is not a site"):
        amplification(run, "rollout", "nothing", lambda *_: None)


def _inherited(unit: Unit) -> float:
    part = unit.part("inherited")
    assert part is not None
    return part.rel_l2


@pytest.mark.whole_matrix
def test_vllm_and_its_regions(tmp_path: Path) -> None:
    """vLLM against itself: a fault of decode alone, and one inside of a fused add and norm."""
    run = run_of(
        tmp_path, "vllm:patch=patches:decode_only_in_vllm", "vllm:patch=patches:scale_fused_norm"
    )
    edges = graft_passes(run, EDGES[:2], lambda *_: None)
    decode, prefill = map(introducers, edges)
    assert prefill == {"layers.2.attn_residual+mlp_norm"}
    assert "layers.1.o_proj" in decode
    assert operators(decode - {"layers.1.o_proj"}) <= {"attn", "logprob"}


@pytest.mark.whole_matrix
def test_deepspeed_under_autocast(tmp_path: Path) -> None:
    """fp32 weights and residuals against a model in bf16, which cannot take fp32 inputs: those
    orders are left out and say so. The fault is the one unit that introduces more than rounding."""
    require_engine("deepspeed")
    run = run_of(
        tmp_path, "hf", "deepspeed:mixed=autocast,stage=3,dp=2,patch=patches:scale_key_norm"
    )
    (edge,) = graft_passes(run, EDGES[1:2], lambda *_: None)
    by_site = {u.name: u for u in decompose(edge, lambda *_: None)}
    introduced = {name: u.part("introduced").rel_l2 for name, u in by_site.items()}
    assert len(introduced) > 60
    assert {name for name, size in introduced.items() if size > 0.005} == {"layers.1.k_norm"}
    assert 0.008 < introduced["layers.1.k_norm"] < 0.012
    assert by_site["embed"].label == "clean"
    assert all(u.label != "undetermined" for u in by_site.values())


def test_megatron_and_its_ranks(tmp_path: Path) -> None:
    """In fp32, with tensor and sequence parallelism: what ranks add up, and what a fault in a fused
    linear changes."""
    run = run_of(
        tmp_path,
        "hf:dtype=float32",
        "megatron:tp=2,sp=1,dtype=float32,patch=patches:scale_up_projection_in_megatron",
    )
    (edge,) = graft_passes(run, EDGES[1:2], lambda *_: None)
    by_site = units(edge)
    large = {n for n, u in by_site.items() if u.part("introduced").rel_l2 > 1e-4}
    assert large == {"layers.1.gate_proj", "layers.1.up_proj"}
    assert by_site["embed"].label == "clean"
    assert by_site["layers.0.k_proj"].part("introduced").rel_l2 < 1e-6
