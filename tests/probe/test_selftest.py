"""The self-test: real faults in a real engine, what counts as seen, and what it says of it."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import command_line, require_engine, write_few_prompts
from inprocess import command

from rlk_align.cli.selftest import RESULTS
from rlk_align.data import data_path
from rlk_align.engines.faults.catalogue import FAULTS, Chosen
from rlk_align.engines.faults.fault import ALL
from rlk_align.errors import BadOption
from rlk_align.model.families import read_shape
from rlk_align.probe.selftest import detect
from rlk_align.probe.selftest.plan import Case, cases, check_engines, check_faults, pairs, pairs_of
from rlk_align.probe.selftest.record import CleanPair, Detection, SelfTest
from rlk_align.probe.selftest.run import SelfTestRequest, _SelfTest
from rlk_align.probe.selftest.table import lines
from rlk_align.trace.run import Run

PLANTED = {
    "hf": (
        *("norm-statistics-bf16", "rope-interleaved", "attn-window"),
        *("residual-twice", "logprob-label-shift", "weight-element", "decode-gain"),
    ),
    "vllm,megatron": (
        *("norm-output-fp8", "rope-key-position", "attn-scale", "proj-gain", "act-swapped"),
        *("residual-branch", "logprob-temperature", "weight-norm"),
    ),
}
SEEDS = {"hf": 1, "vllm,megatron": 0}
DENSE = read_shape(data_path("model"))
SPARSE = read_shape(Path(__file__).parents[2] / "fixtures/sparse")
Found = tuple[str, int, str, dict[str, Any]]
"""Engines, exit code, text and JSON."""


@pytest.fixture(
    scope="module",
    params=["vllm,megatron", pytest.param("hf", marks=pytest.mark.whole_matrix)],
)
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """A self-test of real engines: HF against itself, and vLLM against Megatron."""
    engines = request.param
    for name in engines.split(","):
        require_engine(name)
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
    wanted = {
        (fault, side)
        for fault in PLANTED[engines]
        for side in ("rollout", "train")
        if side == "rollout" or not FAULTS[fault].decode
    }
    assert seen.keys() == wanted
    for (name, side), d in seen.items():
        precheck = FAULTS[name].expected == "precheck"
        assert d["seen"] == ("precheck" if precheck else "named"), d
        assert d["found_side"] == (None if precheck else side), d
        assert d["planted"] == FAULTS[name].site, d
        assert d["others"] == [], d
    assert code == 0, out


def test_a_faulty_log_prob_is_explained(real: Found) -> None:
    words = {d["fault"]: d["words"] for d in real[3]["detections"] if d["op_class"] == "logprob"}
    said = {
        "logprob-label-shift": "scored against the label of the row after",
        "logprob-temperature": "of temperature 1.1:",
    }
    assert words
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


def test_pairs_have_each_engine_on_a_side_that_it_has() -> None:
    assert pairs(("hf", "vllm", "megatron")) == [
        ("vllm", "hf"),
        ("vllm", "megatron"),
        ("hf", "megatron"),
    ]
    assert pairs(("hf",)) == [("hf", "hf")]
    stale = Case(Chosen("kv-stale", FAULTS["kv-stale"], 0.0), "hf")
    assert [*pairs_of(stale, ALL)] == [("hf", "megatron")], "only a rollout decodes"
    twice = Case(
        Chosen("logprob-temperature-twice", FAULTS["logprob-temperature-twice"], 0.0), "megatron"
    )
    assert [*pairs_of(twice, ALL)] == [("hf", "megatron")], "vLLM's prompts know no temperature"


def test_cases_are_faults_by_engine_with_their_curves() -> None:
    once = cases(("hf", "megatron"), tuple(FAULTS), curves=False)
    assert len(once) == len({(c.engine, c.chosen.name) for c in once})
    assert {c.engine for c in once} == {"hf", "megatron"}
    more = cases(("hf",), ("norm-eps", "attn-scale-twice", "weight-element"), curves=True)
    points = [c.chosen.strength for c in more if c.curve]
    assert points == [s for s in FAULTS["norm-eps"].strength.curve if s != 1e-3]


def test_cases_are_in_the_order_that_is_asked_for() -> None:
    asked = ("proj-gain", "weight-norm", "norm-eps")
    assert [c.chosen.name for c in cases(("hf",), asked, curves=False)] == list(asked)


def test_an_engine_is_given_its_settings_beside_a_fault(tmp_path: Path) -> None:
    request = SelfTestRequest(
        engines=("vllm", "megatron"),
        faults=("norm-eps",),
        seeds=0,
        curves=False,
        model="m",
        prompts=tmp_path / "p.jsonl",
        settings={"vllm": "kv_cache_gb=0.5"},
    )
    test = _SelfTest(request, Run(tmp_path), lambda *_: None, lambda _: None)
    assert str(test._spec("vllm:fault=norm-eps")) == "vllm:kv_cache_gb=0.5,fault=norm-eps"
    assert str(test._spec("megatron")) == "megatron"


def test_what_is_unknown_is_refused() -> None:
    with pytest.raises(BadOption, match="nope: unknown"):
        check_faults(["norm-eps", "nope"], DENSE)
    with pytest.raises(BadOption, match="expert-flipped: this qwen3 model lacks the operator"):
        check_faults(["norm-eps", "expert-flipped"], DENSE)
    with pytest.raises(
        BadOption,
        match=r"lacks the operator where it is planted, "
        r"layers\.2\.up_proj",
    ):
        check_faults(["proj-channel-shift"], SPARSE)
    with pytest.raises(BadOption, match="fsdp: it supports no planted fault"):
        check_engines(["hf", "fsdp"])
    # A comma stands between engines, and so between options too.
    with pytest.raises(BadOption, match="vllm:tp=2: the self-test takes engines without options"):
        check_engines(["vllm:tp=2", "dtype=float32", "hf"])
    of_sparse = [name for name, fault in FAULTS.items() if fault.sparse]
    shared = [name for name, fault in FAULTS.items() if fault.needs == "shared"]
    assert check_faults([], DENSE) == tuple(n for n in FAULTS if n not in (*of_sparse, *shared))
    planted = check_faults([], SPARSE)
    with_shared = replace(SPARSE, model_type="glm4_moe", shared_intermediate=64, qk_norm=True)
    assert {*check_faults([], with_shared)} == {*planted, *shared}
    assert {*of_sparse, "norm-eps", "attn-scale"} <= {*planted}
    assert "proj-bias-dropped" not in planted


@pytest.mark.parametrize(("seen", "code"), [("named", 0), ("missed", 1)])
def test_the_exit_code_says_whether_all_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: str, code: int
) -> None:
    result = _selftest(_detection(seen=seen))
    monkeypatch.setattr("rlk_align.probe.selftest.run.selftest", lambda *_: result)
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
        # The first operator that has it was not seen; a later one was.
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
    mismatches = [SimpleNamespace(kind=kind, name=name, detail="") for kind, name in pairs]
    verdict = SimpleNamespace(comparison=SimpleNamespace(mismatches=mismatches, edges=[]))
    finding = detect._finding(verdict, FAULTS["weight-element"], "train")
    assert (finding.outcome, len(finding.others)) == (seen, others)
