"""A comparison held against a contract: NaN fails, empty fails, doubt outweighs a breach."""

import json
import math
from typing import Any

import pytest
from comparisons import QUIET, comparison, contract, edge, metrics, site
from synthetic import compared, corrupt, draw, write_trace

from rlk_align.compare.metrics import edge_metrics
from rlk_align.judge.load import load_contract
from rlk_align.judge.verdict import Verdict, coverage, judge
from rlk_align.report.verdict_json import verdict_json
from rlk_align.results import (
    Comparison,
    Controls,
    EdgeResult,
    Introducer,
    Mismatch,
    Noise,
)

METRICS = (
    "max_abs_dlogp",
    "mean_abs_dlogp",
    "p99_abs_dlogp",
    "p999_abs_dlogp",
    "k3",
    "ratio_mean_error",
    "clip_fraction",
    "token_mult_prob_error",
    "bit_mismatches",
)


def code(verdict: Verdict) -> int:
    status = {"pass": 0, "fail": 1, "inconclusive": 4}[verdict.status]
    assert verdict.exit_code == status
    return status


def test_a_healthy_comparison_passes() -> None:
    verdict = judge(comparison(), contract())
    assert code(verdict) == 0
    assert (verdict.breaches, verdict.doubts) == ([], [])


@pytest.mark.parametrize("metric", METRICS)
def test_a_limit_holds_up_to_its_bound_and_not_beyond(metric: str) -> None:
    field = "ratio_mean" if metric == "ratio_mean_error" else metric
    at = {"ratio_mean": 1.5, "bit_mismatches": 1, "token_mult_prob_error": 1.5}.get(field, 0.5)
    bound = at - (field == "ratio_mean")
    judged = contract({"metric": metric, "fail": bound})
    assert code(judge(comparison(edge(metrics=metrics(**{field: at}))), judged)) == 0
    above = at + 1 if metric == "bit_mismatches" else math.nextafter(at, 9)
    verdict = judge(comparison(edge(metrics=metrics(**{field: above}))), judged)
    assert code(verdict) == 1
    [breach] = verdict.breaches
    assert (breach.metric, breach.limit, breach.fail) == (metric, "l0", bound)
    assert (breach.edge, breach.site) == ("prefill_vs_train", None)
    assert breach.value > bound


# A count has neither, and a share is at most 1.
NO_NUMBERS = [
    (metric, bad)
    for metric in METRICS
    for bad in (math.nan, math.inf)
    if metric != "bit_mismatches" and (metric, bad) != ("clip_fraction", math.inf)
]


@pytest.mark.parametrize(("metric", "bad"), NO_NUMBERS)
def test_nan_and_inf_fail_every_limit(metric: str, bad: float) -> None:
    field = "ratio_mean" if metric == "ratio_mean_error" else metric
    judged = contract({"metric": metric, "fail": 1e300})
    verdict = judge(comparison(edge(metrics=metrics(**{field: bad}))), judged)
    assert code(verdict) == 1
    text = json.dumps(verdict_json(verdict), allow_nan=False)
    assert json.loads(text)["breaches"][0]["value"] is None


def test_nothing_never_passes() -> None:
    import numpy as np

    empty = edge_metrics(np.zeros(0), np.zeros(0))
    nothing = edge(metrics=empty, sites=[], expected_rows=0, paired_rows=0)
    verdict = judge(comparison(nothing), contract({"metric": "bit_mismatches", "fail": 1e9}))
    assert code(verdict) == 4
    assert any("0 of 0" in doubt for doubt in verdict.doubts)
    json.dumps(verdict_json(verdict), allow_nan=False)


def test_too_few_tokens_are_inconclusive() -> None:
    judged = contract(min_tokens=32)
    few = comparison(edge(metrics=metrics(tokens=31)))
    verdict = judge(few, judged)
    assert code(verdict) == 4
    assert "31" in verdict.doubts[0]
    assert code(judge(comparison(edge(metrics=metrics(tokens=32))), judged)) == 0


@pytest.mark.parametrize(("paired", "want"), [(900, 0), (899, 4), (0, 4)])
def test_low_coverage_is_inconclusive(paired: int, want: int) -> None:
    explained = [("layers.0.attn", "train prefill cannot show it: fused", True)]
    shown = comparison(edge(paired_rows=paired, unpaired=explained))
    assert code(judge(shown, contract())) == want
    assert coverage(shown) == (paired, 1000)


def test_coverage_is_of_the_judged_edges() -> None:
    bad = edge("decode_vs_train", paired_rows=0, metrics=metrics(max_abs_dlogp=9.0))
    shown = comparison(edge(), bad, judged=["prefill_vs_train"])
    assert coverage(shown) == (1000, 1000)
    assert code(judge(shown, contract())) == 0


def test_one_unexplained_row_is_inconclusive() -> None:
    lost = [("layers.0.attn", "train prefill lacks 1 rows", False)]
    verdict = judge(comparison(edge(paired_rows=999, unpaired=lost)), contract())
    assert code(verdict) == 4
    assert "layers.0.attn" in verdict.doubts[0]


def test_a_missing_edge_is_inconclusive() -> None:
    shown = comparison(
        judged=["prefill_vs_train", "decode_vs_train"],
        missing_edges={"decode_vs_train": "the rollout trace has no decode pass"},
    )
    verdict = judge(shown, contract())
    assert code(verdict) == 4
    assert "decode_vs_train" in verdict.doubts[0]


@pytest.mark.parametrize(
    ("observer", "want"),
    [("bitwise", 0), ("within noise floor", 0), ("violated", 4), ("not measured", 4)],
)
def test_a_violated_observer_is_inconclusive(observer: str, want: int) -> None:
    controls = Controls(observer=observer, observer_detail=["taps move"], noise=QUIET)
    assert code(judge(comparison(controls=controls), contract())) == want
    assert code(judge(comparison(controls=None), contract())) == 4


def test_doubt_outweighs_a_breach_and_both_are_kept() -> None:
    lost = [("embed", "train prefill lacks 1 rows", False)]
    bad = edge(metrics=metrics(max_abs_dlogp=9.0), unpaired=lost)
    verdict = judge(comparison(bad), contract())
    assert code(verdict) == 4
    assert verdict.breaches
    assert verdict.doubts


def test_a_nonfinite_entry_fails_any_contract() -> None:
    shown = edge(sites=[site(nonfinite=2, first_nonfinite=(0, 1))])
    verdict = judge(comparison(shown), contract({"metric": "k3", "fail": 1e9}))
    assert code(verdict) == 1
    [breach] = verdict.breaches
    assert (breach.metric, breach.site, breach.value) == ("nonfinite", "layers.0.act", 2.0)


def test_limits_hold_on_their_edges() -> None:
    bad = metrics(max_abs_dlogp=1.0)
    shown = comparison(edge(), edge("decode_vs_train", metrics=bad))
    limit = {"metric": "max_abs_dlogp", "fail": 0.1}
    any_k3 = {"metric": "k3", "fail": 1}
    assert code(judge(shown, contract(limit | {"edges": ["prefill_vs_train"]}, any_k3))) == 0
    verdict = judge(shown, contract(limit | {"edges": ["decode_vs_train"]}, any_k3))
    assert [b.edge for b in verdict.breaches] == ["decode_vs_train"]
    assert code(judge(shown, contract(limit))) == 1


def test_an_operators_limit_is_of_its_class() -> None:
    wrong = site(introduced=1, differ=1, valued_rows=1, frontier=[(1.0, 0.5)])
    shown = comparison(edge(sites=[wrong]))
    limit = {"metric": "op_error", "atol": 0.1, "rtol": 0.1, "fail": 1}
    verdict = judge(shown, contract(limit))
    assert code(verdict) == 1
    assert verdict.breaches[0].value == pytest.approx(2.5)
    assert verdict.breaches[0].site == "layers.0.act"
    others = limit | {"op_classes": ["matmul", "attention", "reduction"]}
    wide = limit | {"op_classes": ["elementwise"], "fail": 3}
    assert code(judge(shown, contract(others, wide))) == 0
    assert code(judge(shown, contract(limit | {"atol": 0.4}))) == 0
    zero = limit | {"atol": 0, "rtol": 0}
    assert math.isinf(judge(shown, contract(zero)).breaches[0].value)


def test_bitwise_counts_rows() -> None:
    bitwise = load_contract("bitwise", "bfloat16")
    assert code(judge(comparison(), bitwise)) == 0
    verdict = judge(comparison(edge(sites=[site(differ=3)])), bitwise)
    assert [(b.metric, b.value) for b in verdict.breaches] == [("rows_differ", 3.0)]
    assert code(judge(comparison(edge(metrics=metrics(bit_mismatches=1))), bitwise)) == 1


def noisy(side: str = "train", largest: float = 0.2) -> Controls:
    found = Noise(
        passname="prefill",
        rows=5,
        first_site="layers.1.up_proj",
        max_abs_dlogp=largest,
        mean_abs_dlogp=0.01,
    )
    return Controls(observer="within noise floor", observer_detail=[], noise=QUIET | {side: found})


@pytest.mark.parametrize("largest", [0.0, 1e-9, 0.01, 0.1, 5.0, math.nan])
@pytest.mark.parametrize("side", ["rollout", "train"])
@pytest.mark.parametrize("delta", [0.0, 0.09, 0.11, 3.0])
def test_a_side_that_does_not_repeat_itself_is_named_whatever_was_measured(
    largest: float, side: str, delta: float
) -> None:
    measured = edge(metrics=metrics(max_abs_dlogp=delta))
    verdict = judge(comparison(measured, controls=noisy(side, largest)), contract())
    assert code(verdict) == 4
    [doubt] = verdict.doubts
    assert f"{side} does not repeat itself" in doubt
    assert "first at layers.1.up_proj" in doubt


def test_a_contract_may_allow_for_noise() -> None:
    allowing = contract(max_noise=0.2)
    assert code(judge(comparison(controls=noisy()), allowing)) == 0
    bad = edge(metrics=metrics(max_abs_dlogp=0.11))
    assert code(judge(comparison(bad, controls=noisy()), allowing)) == 1
    for more in (0.201, math.nan):
        assert code(judge(comparison(controls=noisy(largest=more)), allowing)) == 4


def test_no_built_in_contract_allows_for_noise() -> None:
    for name in ("bitwise", "bf16"):
        assert load_contract(name, "bfloat16").max_noise is None


def diverging(name: str, site_name: str = "layers.0.act", **changes: Any) -> EdgeResult:
    """An edge on which one unit introduces a difference."""
    sites = [
        site("embed"),
        site(
            site_name,
            introduced=1,
            differ=1,
            valued_rows=1,
            first_introduced=(0, 1),
            frontier=[(1, 0.5)],
        ),
    ]
    first = Introducer.among(sites[:1], sites[1], (0, 1))
    return edge(name, sites=sites, first_bitwise=first, **changes)


def shown_edge(*edges: EdgeResult, fail: float = 0.1) -> str:
    verdict = judge(comparison(*edges), contract({"metric": "max_abs_dlogp", "fail": fail}))
    record = verdict_json(verdict)
    assert record["divergence"] == record["divergences"][record["divergence"]["edge"]]
    assert list(record["divergences"]) == [e.name for e in edges]
    return record["divergence"]["edge"]


def test_the_headline_is_the_edge_in_breach() -> None:
    def of(name: str, delta: float) -> EdgeResult:
        return diverging(name, metrics=metrics(max_abs_dlogp=delta))

    decode, train, both = "decode_vs_prefill", "prefill_vs_train", "decode_vs_train"
    assert shown_edge(of(decode, 0.05), of(train, 0.05), of(both, 0.05)) == train
    assert shown_edge(of(decode, 0.2), of(train, 0.05), of(both, 0.2)) == decode
    assert shown_edge(of(decode, 0.2), of(train, 0.11), of(both, 0.3)) == decode
    assert shown_edge(of(decode, 0.11), of(train, 0.2), of(both, 0.3)) == train
    assert shown_edge(of(decode, 0.2), of(train, 0.2), of(both, 0.4)) == train
    assert shown_edge(of(decode, 0.09), of(train, 0.09), of(both, 0.11)) == both
    assert shown_edge(of(decode, math.nan), of(train, 5.0), of(both, math.nan)) == decode


def test_without_a_breach_the_headline_is_an_edge_that_differs() -> None:
    assert shown_edge(diverging("decode_vs_prefill"), edge()) == "decode_vs_prefill"
    assert shown_edge(edge("decode_vs_prefill"), edge()) == "prefill_vs_train"


def test_the_first_unit_over_its_limit_is_named_beside_the_first_that_differs() -> None:
    sites = [
        site("layers.0.act", introduced=1, differ=1, first_introduced=(0, 1), frontier=[(1, 0.01)]),
        site(
            "layers.0.down_proj", introduced=1, differ=1, first_introduced=(2, 3), frontier=[(1, 5)]
        ),
        site("layers.1.act", introduced=1, differ=1, first_introduced=(0, 0), frontier=[(1, 9)]),
    ]
    first = Introducer.among([], sites[0], (0, 1))
    limit = {"metric": "op_error", "atol": 0.1, "rtol": 0.1, "fail": 1}
    verdict = judge(comparison(edge(sites=sites, first_bitwise=first)), contract(limit))
    over = verdict_json(verdict)["divergence"]["first_over_budget"]
    assert (over["site"], over["sample"], over["position"]) == ("layers.0.down_proj", 2, 3)
    assert verdict_json(verdict)["divergence"]["first_bitwise"]["site"] == "layers.0.act"


MISMATCH = Mismatch(kind="weights", name="embed", rollout="a", train="b")


def test_a_failed_precheck_stops_everything() -> None:
    shown = comparison(edges=[], mismatches=[MISMATCH], controls=None)
    verdict = judge(shown, contract())
    assert code(verdict) == 4
    record = verdict_json(verdict)
    assert (record["edges"], record["divergence"]) == ({}, None)
    assert record["precheck"]["weights"] == "mismatch"
    assert record["precheck"]["tokens"] == record["precheck"]["attributes"] == "equal"
    assert record["precheck"]["mismatches"] == [
        {
            "kind": "weights",
            "name": "embed",
            "rollout": "a",
            "train": "b",
            "sample": None,
            "position": None,
            "ranks": [],
            "detail": "",
            "derived_copy": {},
        }
    ]
    assert "weights" in record["doubts"][0]


def test_an_allowed_mismatch_is_measured_across_and_said() -> None:
    shown = comparison(mismatches=[MISMATCH], allowed=["weights"])
    verdict = judge(shown, contract())
    assert code(verdict) == 0
    assert verdict_json(verdict)["precheck"]["weights"] != "equal"
    assert verdict_json(verdict)["precheck"]["mismatches"]
    both = comparison(
        edges=[],
        controls=None,
        mismatches=[MISMATCH, Mismatch(kind="tokens", name="p", rollout=[1], train=[2])],
        allowed=["weights"],
    )
    assert code(judge(both, contract())) == 4


# DESIGN, section 6; the names are fixed.
TOP = {"schema", "status", "exit_code", "contract", "model", "dtype", "tokens", "engines"} | {
    *("precheck", "controls", "coverage", "edges", "divergence", "breaches")
}
EDGE_FIELDS = {"max_abs_dlogp", "mean_abs_dlogp", "p99_abs_dlogp", "k1", "k3", "ratio_mean"} | {
    *("ratio_max", "clip_fraction", "ess_fraction", "bit_mismatches", "tokens")
}


def test_the_record_has_the_published_fields(tmp_path) -> None:
    values = draw()
    rollout = write_trace(tmp_path / "a", values, passes=("decode", "prefill"))
    train = write_trace(tmp_path / "b", corrupt(values, "layers.1.act", [(1, 4)]))
    shown = compared(rollout, train, ("decode_vs_prefill", "prefill_vs_train"))
    verdict = judge(shown, load_contract("bitwise", "bfloat16"))
    record = json.loads(json.dumps(verdict_json(verdict), allow_nan=False))
    assert record.keys() >= TOP
    assert record["schema"] == "rlk-align/verdict/1"
    assert (record["status"], record["exit_code"]) == ("fail", 1)
    assert record["contract"].keys() >= {"id", "version", "sha256"}
    assert (record["model"], record["dtype"], record["tokens"]) == ("synthetic", "bfloat16", 15)
    for side in ("rollout", "train"):
        assert record["engines"][side].keys() >= {"name", "version", "options"}
        assert record["controls"]["noise_floor"][side] == "bitwise"
    assert record["precheck"] == {
        "tokens": "equal",
        "weights": "equal",
        "attributes": "equal",
        "rollout_distribution": "raw, at temperature 1 among all tokens",
        "train_distribution": "raw, at temperature 1 among all tokens",
        "mismatches": [],
    }
    assert record["controls"]["observer"] == "bitwise"
    assert record["coverage"].keys() >= {"paired", "expected", "fraction", "unpaired"}
    assert record["coverage"]["fraction"] == 1.0
    assert list(record["edges"]) == ["decode_vs_prefill", "prefill_vs_train"]
    for found in record["edges"].values():
        assert found.keys() >= EDGE_FIELDS
    assert record["divergence"]["edge"] == "prefill_vs_train"
    assert record["divergence"]["first_bitwise"] == {
        "site": "layers.1.act",
        "layer": 1,
        "op": "act",
        "sample": 1,
        "position": 4,
        "last_equal": "layers.1.up_proj",
        "ranks": {},
    }
    for later in ("first_over_budget", "largest_contributor", "largest_amplifier"):
        assert record["divergence"][later] is None
    for breach in record["breaches"]:
        assert breach.keys() >= {"limit", "metric", "value", "fail", "site", "edge"}


def test_the_divergence_is_of_the_first_judged_edge_where_training_is_not() -> None:
    shown = comparison(edge("decode_vs_prefill"), edge("decode_vs_train"))
    assert verdict_json(judge(shown, contract()))["divergence"]["edge"] == "decode_vs_prefill"
    shown = comparison(edge("decode_vs_prefill"), edge("prefill_vs_train"))
    assert verdict_json(judge(shown, contract()))["divergence"]["edge"] == "prefill_vs_train"


def test_unpaired_sites_are_listed_with_their_reason() -> None:
    reasons = [("layers.0.attn", "train prefill cannot show it: fused", True)]
    shown = comparison(edge(unpaired=reasons), edge("decode_vs_train", unpaired=reasons))
    record = verdict_json(judge(shown, contract()))
    assert record["coverage"]["unpaired"] == [
        {"site": "layers.0.attn", "reason": "train prefill cannot show it: fused"}
    ]


def test_production_is_an_edge_of_its_own() -> None:
    shown = comparison(production=metrics(max_abs_dlogp=0.3))
    record = verdict_json(judge(shown, contract()))
    assert record["edges"]["production_vs_observed"]["max_abs_dlogp"] == 0.3
    # A run of an earlier version says nothing of its passes, and loads.
    old = shown.model_dump() | {"production_passes": {}}
    del old["production_passes"]
    assert Comparison.model_validate(old) == shown
    assert record["controls"]["production"] == {}
    silent = verdict_json(judge(comparison(), contract()))
    assert silent["controls"]["production"] == {}
    assert "production_vs_observed" not in silent["edges"]
    assert silent["controls"]["production_vs_observed"] == "not measured"


@pytest.mark.parametrize("bad", [math.nan, math.inf, [1.0, math.nan], {"q_norm": math.nan}])
def test_the_record_is_json_whatever_an_engine_says_of_itself(bad: Any) -> None:
    mismatch = Mismatch(kind="attributes", name="rope_theta", rollout=bad, train=1e4)
    for shown in (
        comparison(mismatches=[mismatch], allowed=["attributes"]),
        comparison(edges=[], mismatches=[mismatch], controls=None),
    ):
        json.dumps(verdict_json(judge(shown, contract())), allow_nan=False)


def test_nan_survives_the_stored_comparison() -> None:
    shown = comparison(edge(metrics=metrics(max_abs_dlogp=math.nan, ratio_max=math.inf)))
    again = Comparison.model_validate_json(shown.model_dump_json())
    found = again.edges[0].metrics
    assert math.isnan(found.max_abs_dlogp)
    assert found.ratio_max == math.inf
    assert code(judge(again, contract())) == 1


def test_rows_whose_values_were_not_kept_are_told_of() -> None:
    partly = site(introduced=5, introduced_valued=2, differ=5, first_introduced=(0, 1))
    limit = {"metric": "op_error", "atol": 0.1, "rtol": 0.1, "fail": 1}
    (note,) = judge(comparison(edge(sites=[partly])), contract(limit)).notes
    assert "values of 2 of 5 rows" in note
    assert "layers.0.act" in note
    assert "--trace-budget" in note


def test_kernels_that_cut_numbers_off_are_told_of() -> None:
    measured = comparison()
    for engine in measured.engines.values():
        engine.environment["cuts"] = "instead of rounding to bfloat16: no FEATURE"
    notes = judge(measured, contract({"metric": "max_abs_dlogp", "fail": 1})).notes
    said = "its own kernels cut numbers off instead of rounding to bfloat16: no FEATURE"
    assert notes == [f"{side}: {said}" for side in ("rollout", "train")]


def test_noisy_rows_that_limits_pass_over_are_told_of() -> None:
    limit = {"metric": "op_error", "atol": 0.1, "rtol": 0.1, "fail": 1}
    noise = comparison(edge(sites=[site(noisy=3)]), controls=noisy(largest=0.01))
    (note,) = judge(noise, contract(limit, max_noise=0.1)).notes
    assert "not checked against noisy rows" in note


def test_a_contract_without_a_limit_on_a_judged_edge_proves_nothing() -> None:
    elsewhere = contract({"metric": "max_abs_dlogp", "fail": 1, "edges": ["decode_vs_prefill"]})
    verdict = judge(comparison(), elsewhere)
    assert code(verdict) == 4
    assert "applies no limit to prefill_vs_train, which has 100" in verdict.doubts[0]


def test_a_limit_that_wants_more_tokens_is_told_and_proves_nothing() -> None:
    quantile = {"metric": "p99_abs_dlogp", "fail": 0.01, "min_tokens": 101}
    told = "prefill_vs_train: limits not applied: 1; 100 tokens are too few, up to 101 are needed"
    beside = judge(comparison(), contract({"metric": "max_abs_dlogp", "fail": 1}, quantile))
    assert code(beside) == 0
    assert any(told in note for note in beside.notes)
    alone = judge(comparison(), contract(quantile))
    assert code(alone) == 4
    assert "applies no limit to prefill_vs_train" in alone.doubts[0]
    enough = judge(comparison(), contract(quantile | {"min_tokens": 100}))
    assert (code(enough), enough.notes) == (0, [])


def test_a_side_that_was_imported_is_a_doubt() -> None:
    verdict = judge(comparison(not_recorded={"train": ["weights", "attributes"]}), contract())
    assert code(verdict) == 4
    assert verdict.doubts == ["train was imported from files that lack its weights and attributes"]
    assert "its operators are recomputed with those of" in verdict.notes[0]


def test_noise_that_was_not_measured_is_a_doubt() -> None:
    unknown = Controls(
        observer="bitwise", observer_detail=[], noise=QUIET | {"train": "not measured"}
    )
    verdict = judge(comparison(controls=unknown), contract())
    assert code(verdict) == 4
    assert "it was not measured whether train repeats itself" in verdict.doubts
    assert code(judge(comparison(controls=unknown), contract(max_noise=0.1))) == 0
