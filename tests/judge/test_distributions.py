"""Limits on distributions over the whole vocabulary, and how reports show them."""

import math
from pathlib import Path
from typing import Any

import pytest
from comparisons import comparison, contract, edge

from rlk_align.judge.contract import DISTRIBUTION_METRICS
from rlk_align.judge.lint import lint
from rlk_align.judge.verdict import Verdict, judge
from rlk_align.report.document_markdown import document_markdown
from rlk_align.report.html.logprobs import metric_rows
from rlk_align.report.verdict import verdict_document
from rlk_align.report.verdict_json import verdict_json
from rlk_align.results import Distribution

FAR = {"kl": 0.5, "reverse_kl": 0.5, "total_variation": 0.5, "max_abs_dlogp": 0.5}
FAR |= {"top1_agreement": 0.5, "top20_agreement": 0.5}
OF_FIELD = {"max_abs_dlogp": "vocabulary_max_abs_dlogp", "top1_agreement": "top1_disagreement"}
OF_FIELD |= {"top20_agreement": "top20_disagreement", "worst_token": "token_excess"}


def distribution(**changes: Any) -> Distribution:
    """Of equal passes at 100 positions, but for the changes."""
    fields = dict.fromkeys(Distribution.model_fields, 0) | {"positions": 100, "vocabulary": 1000}
    ones = {"top1_agreement": 1.0, "top20_agreement": 1.0}
    return Distribution(**fields | ones | {"largest": None} | changes)


LIMITS = [
    {"metric": metric, "fail": 0.1} | ({"floor": 0.01} if metric == "token_excess" else {})
    for metric in DISTRIBUTION_METRICS
]


def judged(found: Distribution | None, **head: Any) -> Verdict:
    return judge(comparison(edge(distribution=found)), contract(*LIMITS, **head))


def test_equal_distributions_hold_every_limit() -> None:
    verdict = judged(distribution())
    assert (verdict.status, verdict.notes[1:]) == ("pass", [])
    assert [c.metric for c in verdict.checks if c.site is None] == list(DISTRIBUTION_METRICS)


@pytest.mark.parametrize("value", [0.5, math.nan])
@pytest.mark.parametrize("field", [*FAR, "worst_token"])
def test_each_figure_is_judged_and_a_nan_fails(field: str, value: float) -> None:
    verdict = judged(distribution(**{field: value}))
    assert (verdict.status, verdict.exit_code) == ("fail", 1)
    assert [b.metric for b in verdict.breaches] == [OF_FIELD.get(field, field)]


def test_an_excess_is_counted_in_typical_tokens() -> None:
    [check] = [
        c
        for c in judged(distribution(worst_token=0.6, typical_token=0.2)).checks
        if c.metric == "token_excess"
    ]
    assert check.value == pytest.approx(3)


def test_too_few_positions_are_said_and_not_judged() -> None:
    few = distribution(**FAR, positions=10, missing=90)
    also = contract(*LIMITS, {"metric": "max_abs_dlogp", "fail": 0.1}, min_tokens=50)
    verdict = judge(comparison(edge(distribution=few)), also)
    assert verdict.status == "pass"
    assert "10 of 100 sampled positions: limits on distributions not applied" in verdict.notes[-1]
    # Nothing else is limited: then nothing was judged.
    assert judged(few, min_tokens=50).status == "inconclusive"
    assert judged(None).status == "inconclusive"


def test_limits_on_sampled_tokens_leave_others_open() -> None:
    bits = {"metric": "bit_mismatches", "fail": 0}
    largest = {"metric": "max_abs_dlogp", "fail": 0.01}
    assert lint(contract(*LIMITS, bits)) == []
    assert lint(contract(*LIMITS, largest)) == []
    for metric in ("total_variation", "top1_disagreement", "top20_disagreement"):
        [found] = lint(contract({"metric": metric, "fail": 1}))
        assert "never above 1" in found.text


def test_reports_show_the_figures_and_name_the_token() -> None:
    verdict = judged(
        distribution(
            kl=0.031, max_abs_dlogp=7.3, largest=(2, 31, 512), worst_token=5.5, worst_token_id=512
        )
    )
    text = document_markdown(verdict_document(verdict, Path("run")))
    assert "distributions over the whole vocabulary" in text
    assert "0.031" in text
    assert "7.3, is that of token 512 at sample 2, position 31" in text
    assert "in the mean token 512 differs most, by 5.5, and a typical one by 0" in text
    of_edge = verdict_json(verdict)["edges"]["prefill_vs_train"]["distribution"]
    assert (of_edge["kl"], of_edge["largest"]) == (0.031, [2, 31, 512])
    rows = dict(metric_rows(verdict, verdict.comparison.edges))
    [(value, check)] = rows["max |Δ| of any token of the vocabulary"]
    assert value == "7.3"
    assert check is not None
    assert check.outcome == "fail"
    without = judge(comparison(edge()), contract())
    assert "whole vocabulary" not in document_markdown(verdict_document(without, Path("run")))
    assert "distribution" not in verdict_json(without)["edges"]["prefill_vs_train"]
