"""The table of healthy runs."""

import math
from typing import Any

import pytest
from comparisons import comparison, contract, edge, metrics
from healthy_report import alarms, group_of, table, verdict_of

from rlk_align.results import Controls

CONTRACT = contract({"metric": "max_abs_dlogp", "fail": 0.1})


def record(**changes: Any) -> dict[str, Any]:
    run = {"model": "m", "dtype": "bfloat16", "pair": "hf-fsdp", "processor": "avx2", "hidden": 64}
    figures = {
        "tokens": 100,
        "sum_abs_dlogp": 0.5,
        "sum_1_minus_p": 40.0,
        "max_abs_dlogp": 0.1,
        "sum_ratio_minus_1": 0.01,
        "sum_k3": 1e-3,
    }
    verdict: dict[str, Any] = {"status": "pass", "breaches": [], "alike": [], "precheck": []}
    return {**run, **figures, "shares": {}, **verdict, **changes}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_group_has_the_sums_of_its_runs_and_the_largest_of_any() -> None:
    shares = {"rounding-norms": {"share": 0.4}}
    noisy = record(sum_abs_dlogp=1.5, max_abs_dlogp=0.3, shares=shares, hidden=100)
    head, _, line = table([record(), noisy], ["dtype", "hidden"])
    row = dict(zip(cells(head), cells(line), strict=True))
    assert row["hidden"] == "to 128"
    assert (row["runs"], row["tokens"]) == ("2", "200")
    assert (row["c"], row["c-max"], row["mean-Δ"]) == ("0.025", "0.037", "0.01")
    assert (row["max-Δ"], row["norms"], row["pass/fail/?"]) == ("0.3", "40%", "2/0/0")


def test_a_nan_in_one_run_shows_in_its_group() -> None:
    *_, line = table([record(), record(max_abs_dlogp=math.nan, sum_abs_dlogp=math.nan)], ["dtype"])
    assert cells(line)[3:7] == ["nan"] * 4


def test_alarms_are_counted_by_run_and_shown_at_their_largest() -> None:
    def breach(value: float) -> dict[str, Any]:
        site = {"limit": "rounding-products", "site": "layers.2.q_proj", "side": "train"}
        figures = {"value": value, "fail": 2.0, "excess": abs(value) / 2}
        return {**site, "metric": "rounding_rms", "edge": "e", **figures}

    bad = record(status="fail", breaches=[breach(3.0), breach(-5.0)], precheck=["position"])
    *_, line = table([record(), bad], ["dtype"])
    assert cells(line)[-2:] == ["1/1/0", "rounding-products 1, precheck 1"]
    *_, line, _ = alarms([record(), bad])
    assert cells(line)[:6] == ["bfloat16", "rounding_rms", "q_proj", "breaches", "1", "2.50"]
    assert list(alarms([record()])) == []


@pytest.mark.parametrize(("largest", "status"), [(0.05, "pass"), (0.5, "fail"), (math.nan, "fail")])
def test_a_run_without_control_passes_is_judged_as_if_it_repeated_itself(
    largest: float, status: str
) -> None:
    unmeasured = Controls(
        observer="violated",
        observer_detail=["there is no pass without taps"],
        noise={"rollout": "not measured", "train": "not measured"},
    )
    found = comparison(edge(metrics=metrics(max_abs_dlogp=largest)), controls=unmeasured)
    verdict = verdict_of(found, CONTRACT)
    assert (verdict["status"], verdict["doubts"]) == (status, [])
    assert len(verdict["breaches"]) == (status == "fail")


def test_a_measured_control_keeps_its_doubt() -> None:
    noisy = Controls(
        observer="violated", observer_detail=["taps"], noise={"rollout": None, "train": None}
    )
    assert verdict_of(comparison(controls=noisy), CONTRACT)["status"] == "inconclusive"


def test_ranges_are_closed_above() -> None:
    assert [group_of("hidden", x)[0] for x in (64, 128, 129, 512, 4096)] == [0, 0, 1, 1, 2]
    assert group_of("pair", "hf-fsdp") == ("hf-fsdp", "hf-fsdp")
