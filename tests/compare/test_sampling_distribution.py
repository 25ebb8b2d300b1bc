"""Which distribution the log-probs of each side are of, from its trace to the words of a report."""

from pathlib import Path
from typing import Any

import pytest
from comparisons import comparison, contract

from rlk_align.compare.sampling_distribution import distributions
from rlk_align.engines.common.attributes import processing
from rlk_align.judge.verdict import judge
from rlk_align.report.sampling_distribution import sides_words
from rlk_align.report.verdict import verdict_document
from rlk_align.report.verdict_json import verdict_json
from rlk_align.results import DISTRIBUTION, Comparison, Mismatch, SamplingDistribution, SideName

UNSTATED = "of a distribution that the engine does not state"
RAW = "raw, at temperature 1 among all tokens"
LIMITS = {"top_k": 40, "top_p": 0.9}
TRUNCATED = (
    "truncated and renormalised, at temperature 0.7 among the tokens that top-k 40, top-p 0.9 keep"
)


class _Side:
    """As much of a trace as is read."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        self.record = self
        self.attributes = attributes


def compared(rollout: dict[str, Any], train: dict[str, Any], stops: bool = False) -> Comparison:
    """With a mismatch of each attribute that differs; `stops`: without edges."""
    sides: dict[SideName, Any] = {"rollout": _Side(rollout), "train": _Side(train)}
    mismatches = [
        Mismatch(kind="attributes", name=n, rollout=rollout.get(n), train=train.get(n))
        for n in DISTRIBUTION
        if rollout.get(n) != train.get(n)
    ]
    stopped = {"edges": [], "controls": None} if stops else {"allowed": ["attributes"]}
    return comparison(distributions=distributions(sides), mismatches=mismatches, **stopped)


@pytest.mark.parametrize(
    ("rollout", "train", "words"),
    [
        (processing(1.0), processing(1.0), f"both sides' are {RAW}"),
        (
            processing(0.7), processing(0.7),
            "both sides' are divided by the temperature, at temperature 0.7 among all tokens",
        ),
        (
            processing(0.7, LIMITS), processing(1.0),
            f"the rollout's are {TRUNCATED}; the trainer's are {RAW}",
        ),
        (
            processing(1.0), processing(1.0, {"min_p": 0.05}),
            f"the rollout's are {RAW}; the trainer's are truncated and renormalised, at "
            "temperature 1 among the tokens that min-p 0.05 keeps",
        ),
        (
            processing(1.0), {},
            f"the rollout's are {RAW}; the trainer's are {UNSTATED}",
        ),
        (
            processing(1.0), {"temperature": "warm"},
            f"the rollout's are {RAW}; the trainer's are {UNSTATED}",
        ),
        ({}, {}, ""),
    ],
)  # fmt: skip
def test_each_side_is_described(rollout: dict, train: dict, words: str) -> None:
    assert sides_words(compared(rollout, train)) == words


def test_the_verdict_says_it_and_the_json_too(tmp_path: Path) -> None:
    verdict = judge(compared(processing(0.7, LIMITS), processing(1.0)), contract())
    facts = {fact.label: fact.text for fact in verdict_document(verdict, tmp_path).facts}
    assert facts["log-probs"] == f"the rollout's are {TRUNCATED}; the trainer's are {RAW}"
    precheck = verdict_json(verdict)["precheck"]
    assert precheck["rollout_distribution"] == TRUNCATED
    assert precheck["train_distribution"] == RAW
    older = judge(comparison(), contract())
    assert "log-probs" not in {f.label for f in verdict_document(older, tmp_path).facts}
    assert "train_distribution" not in verdict_json(older)["precheck"]


def test_a_precheck_that_stops_names_the_distributions(tmp_path: Path) -> None:
    verdict = judge(compared(processing(1.0), processing(0.7), stops=True), contract())
    headline = verdict_document(verdict, tmp_path).headline
    assert headline == (
        f"The log-probs are of different distributions: the rollout's are {RAW}; the trainer's are "
        "divided by the temperature, at temperature 0.7 among all tokens."
    )
    assert verdict.exit_code == 4


def test_another_mismatch_is_the_headline_where_it_comes_first(tmp_path: Path) -> None:
    weights = Mismatch(kind="weights", name="embed", rollout="a", train="b")
    apart = {
        "rollout": SamplingDistribution(temperature=0.7),
        "train": SamplingDistribution(temperature=1.0),
    }
    stopped = comparison(distributions=apart, mismatches=[weights], edges=[], controls=None)
    headline = verdict_document(judge(stopped, contract()), tmp_path).headline
    assert headline.startswith("The two sides have different inputs: weights embed")
