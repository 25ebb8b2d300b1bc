"""The self-test: real faults in real engines, the outcomes, and the report."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command import command_line, require_engine, write_few_prompts
from inprocess import command

from rlk_align.api.options import specs as split
from rlk_align.cli.selftest import RESULTS
from rlk_align.data import data_path
from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import BadOption
from rlk_align.model.shape import read_shape
from rlk_align.selftest import detect
from rlk_align.selftest.faults.catalogue import FAULTS, Chosen
from rlk_align.selftest.faults.fault import ALL
from rlk_align.selftest.plan import (
    Case,
    cases,
    check_engines,
    check_faults,
    pairs,
    pairs_of,
    refused,
)
from rlk_align.selftest.record import CleanPair, Detection, SelfTest
from rlk_align.selftest.table import lines

PLANTED = {
    "hf": (
        *("norm-statistics-bf16", "rope-interleaved", "attn-window"),
        *("residual-twice", "logprob-label-shift", "weight-element", "decode-gain"),
    ),
    "vllm,megatron": (
        *("embed-one-token", "rope-key-position", "attn-scale", "act-swapped"),
        *("logprob-temperature", "copy-stale-head"),
    ),
    "vllm:tp=2,max_num_seqs=4,hf": (
        *("proj-gain", "logits-bf16", "weight-norm", "copy-stale-head", "copy-stale-linear"),
    ),
}
SEEDS = {"hf": 1, "vllm,megatron": 0, "vllm:tp=2,max_num_seqs=4,hf": 1}
DENSE = read_shape(data_path("model"))
SPARSE = read_shape(Path(__file__).parents[2] / "fixtures/sparse")
Found = tuple[str, int, str, dict[str, Any]]
"""Engines, exit code, text and JSON."""


@pytest.fixture(
    scope="module",
    params=[
        "vllm,megatron",
        *(
            pytest.param(engines, marks=pytest.mark.whole_matrix)
            for engines in ("hf", "vllm:tp=2,max_num_seqs=4,hf")
        ),
    ],
)
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """A self-test of real engines: HF against itself, vLLM against Megatron, and vLLM's two ranks
    against HF."""
    engines = request.param
    for text in split(engines):
        require_engine(text.partition(":")[0])
    folder = tmp_path_factory.mktemp("selftest")
    few = write_few_prompts(folder / "few.jsonl")
    done = command_line(folder)(
        *("selftest", "--engines", engines, "--faults", ",".join(PLANTED[engines])),
        *("--seeds", SEEDS[engines], "--no-curves", "--prompts", few),
        *("--run-dir", folder / "run", "--output", f"json={folder / 'out.json'}"),
        shared=False,
    )
    assert done.code in (0, 1), done.err
    found = json.loads((folder / "out.json").read_text())
    kept = (folder / "run" / RESULTS).read_text().splitlines()
    assert [json.loads(text) for text in kept] == [*found["detections"], *found["clean"]]
    return engines, done.code, done.out, found


def test_every_planted_fault_is_named_on_its_side(real: Found) -> None:
    engines, code, out, found = real
    seen = {(d["fault"], d["side"]): d for d in found["detections"]}
    names = [text.partition(":")[0] for text in split(engines)]
    engine = {"rollout": names[0], "train": names[-1]}
    wanted = {
        (fault, side)
        for fault in PLANTED[engines]
        for side in ("rollout", "train")
        if (side == "rollout" or not FAULTS[fault].decode)
        and engine[side] in {text.partition(":")[0] for text in FAULTS[fault].engines}
    }
    assert seen.keys() == wanted
    for (name, side), d in seen.items():
        precheck = FAULTS[name].expected == "precheck"
        assert d["seen"] == ("precheck" if precheck else "named"), d
        assert d["found_side"] == (None if precheck else side), d
        assert d["planted"] == FAULTS[name].site, d
        assert d["others"] == [], d
    assert code == 0, out


def test_engines_are_named_with_their_options(real: Found) -> None:
    engines, _, out, found = real
    asked = [str(EngineSpec.parse(text)) for text in split(engines)]
    assert [*found["engines"]] == asked
    assert {d[side] for d in found["detections"] for side in ("rollout", "train")} == {*asked}
    assert all(text in out.splitlines()[0] for text in asked)


def test_a_faulty_log_prob_is_explained(real: Found) -> None:
    words = {d["fault"]: d["words"] for d in real[3]["detections"] if d["op_class"] == "logprob"}
    said = {
        "logprob-label-shift": "scored against the label of the row after",
        "logprob-temperature": "of temperature 1.1:",
    }
    assert {*words} == {*said} & {*PLANTED[real[0]]}
    for fault, text in words.items():
        assert said[fault] in text


def test_nothing_is_blamed_where_nothing_is_wrong(real: Found) -> None:
    engines, _, out, found = real
    assert [(c["seed"], c["alarms"]) for c in found["clean"]] == [
        (s, []) for s in range(SEEDS[engines])
    ]
    assert ("false alarms: in 0 of 1 pairs" in out) == bool(SEEDS[engines])


def _detection(**changes: Any) -> Detection:
    usual = {
        "fault": "norm-eps",
        "op_class": "norm",
        "strength": 1e-3,
        "unit": "added to epsilon",
        "expected": "named",
        "curve": False,
        "rollout": "vllm",
        "train": "megatron",
        "side": "train",
        "site": "layers.0.attn_norm",
        "planted": "layers.0.attn_norm",
        "seen": "named",
        "found_site": "layers.0.attn_norm",
        "found_side": "train",
        "words": "",
        "others": [],
        "metrics": None,
    }
    return Detection(**usual | changes)


def _clean(*alarms: str) -> CleanPair:
    return CleanPair(seed=3, rollout="vllm", train="hf", tokens=100, alarms=list(alarms))


def _selftest(*detections: Detection, clean: CleanPair | None = None) -> SelfTest:
    return SelfTest(
        engines={"hf": "1"}, rows=10, detections=list(detections), clean=[clean or _clean()]
    )


@pytest.mark.parametrize(
    ("changes", "good"),
    [
        ({}, True),
        ({"seen": "missed"}, False),
        ({"seen": "misnamed"}, False),
        ({"seen": "wrong side"}, False),
        ({"seen": "within budget"}, False),
        ({"others": ["layers.3.attn of rollout"]}, False),
        ({"planted": "layers.1.attn_norm"}, False),
        ({"planted": None}, False),
        ({"expected": "rounding", "seen": "within budget"}, True),
        ({"expected": "rounding", "seen": "misnamed"}, False),
        ({"expected": "precheck"}, False),
        ({"expected": "precheck", "seen": "precheck"}, True),
        ({"curve": True, "planted": None, "seen": "missed"}, True),
        ({"curve": True, "planted": None, "seen": "misnamed"}, False),
    ],
)
def test_what_counts_as_seen(changes: dict[str, Any], good: bool) -> None:
    result = _selftest(_detection(**changes))
    assert result.passed == good
    assert ("not as expected: 1" in "\n".join(lines(result))) != good


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        ("layers.1.attn_norm", "; the engine diverges from itself at layers.1.attn_norm"),
        (None, "; the engine diverges from itself nowhere: the fault changes nothing"),
    ],
)
def test_it_says_where_a_fault_was_planted_instead(planted: str | None, said: str) -> None:
    assert any(x.endswith(said) for x in lines(_selftest(_detection(planted=planted))))


def test_a_false_alarm_fails() -> None:
    result = _selftest(_detection(), clean=_clean("layers.1.attn of train"))
    assert not result.passed
    assert "seed 3, vllm against hf: layers.1.attn of train" in "\n".join(lines(result))


def test_nothing_tested_is_no_pass() -> None:
    assert not _selftest().passed


def test_the_smallest_strength_is_the_last_that_is_named_without_a_gap() -> None:
    strengths = {1e-3: "named", 1e-4: "named", 1e-5: "missed", 1e-6: "named"}
    points = [
        _detection(strength=s, seen=seen, curve=s != 1e-3, planted="layers.0.attn_norm")
        for s, seen in strengths.items()
    ]
    row = next(x for x in lines(_selftest(*points)) if x.startswith("norm-eps "))
    assert row.split() == ["norm-eps", "added", "to", "epsilon", "0.0001"]
    row = next(x for x in lines(_selftest(*points[:2])) if x.startswith("norm-eps "))
    assert row.split()[-2:] == ["≤", "0.0001"]


def specs(*texts: str) -> tuple[EngineSpec, ...]:
    return tuple(map(EngineSpec.parse, texts))


def usual(fault: str, engine: str) -> Case:
    """The fault with its default strength in this engine."""
    strength = FAULTS[fault].strength
    chosen = Chosen(fault, FAULTS[fault], strength.default if strength else 0.0)
    return Case(chosen, EngineSpec.parse(engine))


def of_pairs(found: Iterable[tuple[EngineSpec, EngineSpec]]) -> list[tuple[str, str]]:
    return [(str(a), str(b)) for a, b in found]


def test_pairs_have_each_engine_on_a_side_that_it_has() -> None:
    assert of_pairs(pairs(specs("hf", "vllm:tp=2", "megatron"))) == [
        ("vllm:tp=2", "hf"),
        ("vllm:tp=2", "megatron"),
        ("hf", "megatron"),
    ]
    assert of_pairs(pairs(specs("hf"))) == [("hf", "hf")]
    every = specs(*ALL)
    assert of_pairs(pairs(specs("fsdp:dp=2", "hf"))) == [("hf", "fsdp:dp=2")]
    sharded = cases(specs("hf", "fsdp:dp=2"), ("norm-eps", "router-bf16"), curves=False)
    assert [c.engine.name for c in sharded] == ["hf", "hf", "fsdp", "fsdp"]
    decode = cases(specs("hf", "fsdp:dp=2"), ("kv-stale",), curves=False)
    assert [c.engine.name for c in decode] == ["hf"], "FSDP does not sample"
    stale = of_pairs(pairs_of(usual("kv-stale", "hf"), every))
    assert stale == [("hf", "megatron")], "only a rollout decodes"
    twice = of_pairs(pairs_of(usual("logprob-temperature-twice", "megatron"), every))
    assert twice == [("hf", "megatron")], "vLLM's prompts know no temperature"


def test_cases_are_faults_by_engine_with_their_curves() -> None:
    once = cases(specs("hf", "megatron"), tuple(FAULTS), curves=False)
    assert len(once) == len({(c.engine.name, c.chosen.name) for c in once})
    assert {c.engine.name for c in once} == {"hf", "megatron"}
    more = cases(specs("hf"), ("norm-eps", "attn-scale-twice", "weight-element"), curves=True)
    points = [c.chosen.strength for c in more if c.curve]
    assert points == [s for s in FAULTS["norm-eps"].strength.curve if s != 1e-3]


def test_cases_are_in_the_order_that_is_asked_for() -> None:
    asked = ("proj-gain", "weight-norm", "norm-eps")
    assert [c.chosen.name for c in cases(specs("hf"), asked, curves=False)] == list(asked)


def test_an_engine_keeps_its_options_beside_a_fault() -> None:
    case = usual("logits-bf16", "vllm:tp=2,dtype=fp32")
    assert str(case.clean) == "vllm:tp=2,dtype=float32"
    assert str(case.faulty) == "vllm:tp=2,dtype=float32,fault=logits-bf16"
    assert str(case.beside(EngineSpec.parse("hf:batch=4"))) == "hf:batch=4,dtype=float32"


@pytest.mark.parametrize(
    ("fault", "engine", "other", "why"),
    [
        ("logits-bf16", "hf:dtype=bf16", "vllm", "has dtype=bfloat16, and dtype=float32 is needed"),
        ("logits-bf16", "vllm", "hf:dtype=bf16", "has dtype=bfloat16, and dtype=float32 is needed"),
        ("packed-boundary", "megatron:cp=2", "hf", "with cp=2 sequences end where ranks can share"),
        ("norm-eps", "megatron:spec=te", "hf", "only be planted in Megatron's local spec"),
        ("norm-cast-order", "hf:dtype=fp32", "vllm", "changes nothing with dtype=float32"),
    ],
)
def test_what_options_rule_out_is_left_out_with_the_reason(
    fault: str, engine: str, other: str, why: str
) -> None:
    """A named fault that no engine of the test supports is refused."""
    engines, name = specs(engine, other), engine.partition(":")[0]
    assert name not in [c.engine.name for c in cases(engines, [fault], curves=False)]
    assert cases(specs(*{name, "hf", "vllm"}), [fault], curves=False), "without the options"
    (error,) = [e for case, e in refused(engines, [fault]) if case.engine.name == name]
    assert why in error.message
    if not cases(engines, [fault], curves=False):
        with pytest.raises(BadOption, match=f"--faults {fault}: .*{why}"):
            check_faults([fault], DENSE, engines)


def test_what_is_left_out_is_told() -> None:
    report = _selftest(_detection()).model_copy(update={"left_out": ("norm-eps in hf: why",)})
    text = "\n".join(lines(report))
    assert "left out: 1\n  norm-eps in hf: why" in text
    assert "left out" not in "\n".join(lines(_selftest(_detection())))


def test_what_is_unknown_is_refused() -> None:
    hf = specs("hf")
    with pytest.raises(BadOption, match="nope: unknown"):
        check_faults(["norm-eps", "nope"], DENSE, hf)
    with pytest.raises(BadOption, match="expert-flipped: this qwen3 model lacks the operator"):
        check_faults(["norm-eps", "expert-flipped"], DENSE, hf)
    with pytest.raises(
        BadOption,
        match=r"lacks the operator where it is planted, "
        r"layers\.2\.up_proj",
    ):
        check_faults(["proj-channel-shift"], SPARSE, hf)
    with pytest.raises(BadOption, match="packed-boundary: it cannot be planted in hf"):
        check_faults(["packed-boundary"], DENSE, hf)
    of_sparse = [n for n, fault in FAULTS.items() if fault.sparse and fault.needs != "variant"]
    shared = [name for name, fault in FAULTS.items() if fault.needs in ("shared", "variant")]
    assert check_faults([], DENSE, hf) == tuple(n for n in FAULTS if n not in (*of_sparse, *shared))
    planted = check_faults([], SPARSE, hf)
    with_shared = replace(SPARSE, model_type="glm4_moe", shared_intermediate=64, qk_norm=True)
    shared = [name for name, fault in FAULTS.items() if fault.needs == "shared"]
    assert {*check_faults([], with_shared, hf)} == {*planted, *shared}
    assert {*of_sparse, "norm-eps", "attn-scale"} <= {*planted}
    assert "proj-bias-dropped" not in planted


@pytest.mark.parametrize(
    ("engines", "said"),
    [
        (
            "nope:tp=2,hf",
            "engine 'nope' is unknown; choose from deepspeed, fsdp, hf, megatron, sglang, vllm",
        ),
        ("hf:tp=2", "engine 'hf' has no option 'tp'"),
        ("hf,tp=2", "engine 'tp=2' is unknown"),
        ("fsdp:dp=2", "--engines fsdp:dp=2: none of them samples"),
        (
            "hf:batch=4,padding=left,hf",
            "--engines hf:batch=4,padding=left,hf: engine 'hf' is named",
        ),
        ("hf:fault=norm-eps", "the self-test plants the faults itself: name them by --faults"),
        ("hf:model=other", "the self-test gives all engines one model: name it by --model"),
    ],
)
def test_engines_that_cannot_be_tested_are_refused(engines: str, said: str) -> None:
    code, text = command("selftest", "--engines", engines)
    assert code == 2, text
    assert said in " ".join(text.split())


def test_a_trainer_alone_is_refused() -> None:
    require_engine("megatron")
    with pytest.raises(BadOption, match="--engines megatron:tp=2: none of them samples"):
        check_engines(["megatron:tp=2"])


def test_ranks_that_the_model_does_not_take_are_refused_before_an_engine_starts(
    tmp_path: Path,
) -> None:
    require_engine("vllm")
    code, text = command("selftest", "--engines", "vllm:tp=3,hf", "--run-dir", tmp_path / "run")
    assert code == 2, text
    assert "tp=3: 8 heads cannot be divided among 3 ranks" in " ".join(text.split())
    assert not (tmp_path / "run/captures").exists()


@pytest.mark.parametrize(("seen", "code"), [("named", 0), ("missed", 1)])
def test_the_exit_code_says_whether_all_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: str, code: int
) -> None:
    result = _selftest(_detection(seen=seen))
    monkeypatch.setattr("rlk_align.selftest.fault_trials.selftest", lambda *_: result)
    out = tmp_path / "out.json"
    words = ("selftest", "--engines", "hf", "--run-dir", tmp_path / "run")
    ended, said = command(*words, "--output", f"json={out}")
    assert ended == code, said
    assert SelfTest.model_validate_json(out.read_text()) == result
    assert "norm   1" in said


def _over(*units: tuple[str, str]) -> list[SimpleNamespace]:
    return [SimpleNamespace(unit=SimpleNamespace(site=s), side=side, units=[]) for s, side in units]


@pytest.mark.parametrize(
    ("fault", "over", "seen", "others"),
    [
        ("norm-eps", [("layers.0.attn_norm", "train")], "named", 0),
        ("norm-eps", [("layers.0.attn_norm", "rollout")], "wrong side", 0),
        ("norm-eps", [("layers.0.attn_norm", "both")], "wrong side", 0),
        ("norm-eps", [("layers.0.q_proj", "train")], "misnamed", 1),
        ("norm-eps", [("layers.0.attn_norm", "train"), ("logits", "rollout")], "named", 1),
        ("norm-eps", [], "missed", 0),
        ("norm-cast-order", [], "within budget", 0),
        ("rope-base", [("layers.1.q_rope", "train"), ("layers.1.k_rope", "train")], "named", 0),
        # The first operator with the fault was missed, and a later one was named.
        ("rope-base", [("layers.1.k_rope", "train")], "missed", 0),
        ("weight-element", [], "missed", 0),
    ],
)
def test_what_is_over_budget_is_held_against_what_was_planted(
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    over: list[tuple[str, str]],
    seen: str,
    others: int,
) -> None:
    monkeypatch.setattr(detect, "over_budget", lambda *_: _over(*over))
    comparison = SimpleNamespace(mismatches=[], edges=["an edge"])
    verdict = SimpleNamespace(comparison=comparison, contract=None)
    finding = detect._finding(verdict, FAULTS[fault], "train")
    assert (finding.outcome, len(finding.others)) == (seen, others)


def test_a_difference_that_stops_nothing_hides_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "over_budget", lambda *_: _over(("layers.1.delta", "train")))
    shown = SimpleNamespace(kind="attributes", name="delta_a_log_dtype", detail="", stops=False)
    comparison = SimpleNamespace(mismatches=[shown], edges=["an edge"])
    verdict = SimpleNamespace(comparison=comparison, contract=None)
    assert detect._finding(verdict, FAULTS["delta-stale"], "train").outcome == "named"
    assert (
        detect.alarms(SimpleNamespace(comparison=SimpleNamespace(mismatches=[shown], edges=[])))
        == []
    )


@pytest.mark.parametrize(
    ("names", "seen", "others"),
    [
        (["weights layers.2.q_proj"], "precheck", 0),
        (["weights layers.3.q_proj"], "misnamed", 0),
        (["weights layers.2.q_proj", "attributes norm_eps"], "precheck", 1),
    ],
)
def test_a_precheck_must_name_what_was_planted(names: list[str], seen: str, others: int) -> None:
    pairs = [name.split() for name in names]
    mismatches = [
        SimpleNamespace(kind=kind, name=name, detail="", stops=True) for kind, name in pairs
    ]
    verdict = SimpleNamespace(comparison=SimpleNamespace(mismatches=mismatches, edges=[]))
    finding = detect._finding(verdict, FAULTS["weight-element"], "train")
    assert (finding.outcome, len(finding.others)) == (seen, others)
