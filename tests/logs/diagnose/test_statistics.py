"""Intervals, and the sample of a run."""

import math

import numpy as np
import pytest
from simulate_dumps import healthy

from rlk_align.interval import mean_factor, quotient, ratio, share, student
from rlk_align.logs.diagnose.contract import load_run_contract
from rlk_align.logs.diagnose.explain import mean_of
from rlk_align.logs.diagnose.sample import gather

CONTRACT = load_run_contract()


def test_students_quantiles_are_wide_enough() -> None:
    """The exact quantiles of the probability 1 − 3.167e-5 are 32.6, 9.65, 6.25, 4.41 and 4.08."""
    for freedom, exact in ((3, 32.6), (6, 9.65), (10, 6.46), (40, 4.48), (200, 4.09)):
        assert 0.97 * exact < student(freedom) < 1.25 * exact
    assert student(1e9) == pytest.approx(4, abs=1e-3)


def test_a_ratio_holds_the_true_one_where_sequences_differ() -> None:
    """Tokens of a sequence share its error; an interval of independent tokens would miss it."""
    draw = np.random.default_rng(0)
    inside = 0
    for _ in range(300):
        tokens = draw.integers(20, 200, 30).astype(float)
        sums = tokens * (1 + 0.3 * draw.standard_normal(30))
        estimate = ratio(sums, tokens)
        inside += estimate.low <= 1 <= estimate.high
    assert inside == 300


def test_a_quotient_of_parts() -> None:
    draw = np.random.default_rng(1)
    tokens = np.full(50, 100.0)
    worse = tokens * 0.1 * (1 + 0.1 * draw.standard_normal(50))
    better = tokens * 0.05 * (1 + 0.1 * draw.standard_normal(50))
    estimate = quotient((worse, tokens), (better, tokens))
    assert 1.7 < estimate.low < 2 < estimate.high < 2.3
    logs = mean_factor(np.log(worse / tokens), np.log(better / tokens))
    assert 1.7 < logs.low < 2 < logs.high < 2.3


def test_nothing_is_above_a_limit_where_nothing_can_be_said() -> None:
    nothing = np.zeros(5)
    for estimate in (
        ratio(nothing, nothing),
        quotient((nothing, nothing), (nothing, nothing)),
        share(0, 0),
        mean_factor(np.array([1.0])),
    ):
        assert math.isnan(estimate.value)
        assert not estimate.above(-1.0)


def test_one_sequence_has_no_interval() -> None:
    estimate = ratio(np.array([5.0]), np.array([2.0]))
    assert estimate.low == -math.inf


def test_the_sample_is_bounded_seeded_and_in_order() -> None:
    runs = [healthy(seed, 2_000) for seed in range(12)]
    total = sum(len(r) for r in runs)
    one, again = gather(runs, CONTRACT, 7, 5_000), gather(runs, CONTRACT, 7, 5_000)
    other = gather(runs, CONTRACT, 8, 5_000)
    assert one.kept is not None
    assert again.kept is not None
    assert other.kept is not None
    assert one.kept.tokens <= 5_000
    assert not one.whole
    assert one.counts.sequences == total
    np.testing.assert_array_equal(one.kept.rollout, again.kept.rollout)
    assert not np.array_equal(one.kept.offsets, other.kept.offsets)
    whole = gather(runs, CONTRACT, 7)
    assert whole.whole
    assert whole.kept is not None
    assert whole.kept.tokens == sum(r.tokens for r in runs)
    for a, b in ((one, whole), (other, whole)):
        assert mean_of(a.ratio) == mean_of(b.ratio)
    kept = whole.kept
    for k in (0, 17, total - 1):
        assert kept.tokens == kept.offsets[-1]
        assert kept.take(np.array([k])).ids == [kept.ids[k]]
