"""The recorded faults of hybrid layers, and the tables of `docs/hybrid.md` made of them."""

import json

import hybrid_faults
import pytest

from rlk_align.selftest.faults.catalogue import faults_of

FOUND = json.loads(hybrid_faults.FOUND.read_text(encoding="utf-8"))


def test_the_tables_of_the_docs_are_those_of_the_recorded_runs() -> None:
    assert hybrid_faults.PAGE.read_text(encoding="utf-8") == hybrid_faults.page(FOUND)


@pytest.mark.parametrize("name", FOUND)
def test_each_recorded_fault_is_found_as_expected(name: str) -> None:
    run = FOUND[name]
    assert run["alarms"] == []
    assert run["clean_pairs"] > 0
    assert run["detections"]
    assert all(map(hybrid_faults.as_expected, run["detections"]))


@pytest.mark.parametrize("name", FOUND)
def test_each_fault_ran_in_each_engine_that_can_have_it(name: str) -> None:
    run, (family, _, which) = FOUND[name], name.partition(" ")
    group = {"qwen3_5_text": "recurrence", "granitemoehybrid": "state space"}[family]
    ran = {(d["fault"], d[d["side"]].partition(":")[0]) for d in run["detections"]}
    rollouts = {d["rollout"].partition(":")[0] for d in run["detections"]}
    for engine in (text.partition(":")[0] for text in run["engines"]):
        every = {n: f for n, f in faults_of(engine).items() if f.op_class == group}
        possible = {n: f for n, f in every.items() if not (which and f.not_beside_kernels)}
        wanted = {n for n, f in possible.items() if not f.decode or engine in rollouts}
        assert {(n, engine) for n in wanted} <= ran


def test_what_is_not_expected_is_not_passed_over() -> None:
    run = next(iter(FOUND.values()))
    named = next(d for d in run["detections"] if d["seen"] == "named")
    assert hybrid_faults.as_expected(named)
    for change in (
        {"found_side": "neither"},
        {"found_site": "layers.0.attn_norm"},
        {"seen": "within budget", "expected": "named"},
        {"others": ["layers.3.attn of train"]},
    ):
        wrong = named | change
        assert not hybrid_faults.as_expected(wrong)
        assert "**" in hybrid_faults.cell(named["fault"], "hf", [wrong], [])
