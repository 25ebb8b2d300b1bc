"""Zeros in place of log-probs, and zeros that a truncated distribution gives."""

import numpy as np
import pytest
from explained import CONTRACT, explained
from simulate_dumps import faulty, healthy

from rlk_align.logs.diagnose.bookkeeping import missing
from rlk_align.logs.diagnose.evidence import Evidence
from rlk_align.logs.diagnose.sample import gather
from rlk_align.logs.dumps.sequences import Sequences


def filled(run: Sequences) -> int:
    """The number of tokens with another value in place of a log-prob."""
    sample = gather([run], CONTRACT)
    assert sample.kept is not None
    return int(Evidence(sample.kept, sample.counts, CONTRACT).filled.sum())


def at(run: Sequences, low: float, high: float) -> np.ndarray:
    """Compared tokens whose trainer's log-prob is between the two."""
    return np.flatnonzero(run.compared & (run.train > low) & (run.train < high))


@pytest.mark.parametrize("side", ["rollout", "train"])
def test_one_zero_of_a_token_that_is_not_sure_is_named(side: str) -> None:
    run = healthy(3, 2_000)
    assert filled(run) == 0
    getattr(run, side)[at(run, -0.6, -0.3)[0]] = 0.0
    assert filled(run) == 1
    found = explained(run)
    assert [d.name for d in found.diagnoses] == ["missing"]


def test_a_zero_of_a_token_that_is_nearly_sure_may_be_honest() -> None:
    run = healthy(3, 2_000)
    run.rollout[at(run, -0.045, -0.01)[0]] = 0.0
    assert filled(run) == 0


def test_one_zero_fails_at_any_share() -> None:
    run = healthy(3, 110_000)
    run.rollout[at(run, -0.1, -0.06)[0]] = 0.0
    assert filled(run) == 1
    found = explained(run)
    assert found.exit_code == 1
    assert "1 of 110,424 compared tokens has another value" in found.diagnoses[0].why


def test_a_zero_that_no_sampled_sequence_has_fails() -> None:
    """A run that is larger than the sample is counted as a whole."""
    run = healthy(3, 20_000)
    run.train[at(run, -3.0, -2.0)[-1]] = 0.0
    sample = gather([run], CONTRACT, most=2_000)
    assert sample.kept is not None
    assert sample.counts.filled == 1
    assert not Evidence(sample.kept, sample.counts, CONTRACT).filled.any()
    found = missing(Evidence(sample.kept, sample.counts, CONTRACT))
    assert found is not None
    assert found.name == "missing"


@pytest.mark.parametrize(("low", "high"), [(-0.6, -0.3), (-5.0, -1.6)])
def test_wild_tokens_are_no_fill(low: float, high: float) -> None:
    """As many tokens are thrown to nearly 0 as to 0, as in a broken decode: neither is a value in a
    log-prob's place."""
    run = healthy(3, 2_000)
    places = at(run, low, high)
    run.rollout[places[:2]] = 0.0
    assert filled(run) == 2
    run.rollout[places[2:4]] = -0.005
    assert filled(run) == 0


@pytest.mark.parametrize("bound", [0.95, 0.9, 0.7])
def test_zeros_of_a_truncated_law_are_honest(bound: float) -> None:
    run = faulty("rollout renormalised", 3, 20_000, bound)
    zeros = run.compared & (run.rollout == 0) & (run.train < -0.05)
    assert zeros.any() or bound > 0.94
    assert filled(run) == 0
