"""Limits from healthy runs."""

import tomllib

import numpy as np
import pytest
from comparisons import comparison, contract, edge, metrics, site

from rlk_align.errors import BadOption
from rlk_align.judge.calibrate import MARGIN, HealthyRun, calibrated, fitted_tail, rounded_up
from rlk_align.judge.contract import Contract
from rlk_align.judge.lint import lint
from rlk_align.judge.load import open_contract
from rlk_align.judge.verdict import judge

BASE = contract(
    {"metric": "max_abs_dlogp", "fail": 0.06}, {"metric": "mean_abs_dlogp", "fail": 0.005}
)


def healthy(seed: int, tokens: int = 2000, scale: float = 0.004) -> HealthyRun:
    sizes = np.random.default_rng(seed).exponential(scale, tokens)
    figures = metrics(
        max_abs_dlogp=float(sizes.max()), mean_abs_dlogp=float(sizes.mean()), tokens=tokens
    )
    found = comparison(edge(metrics=figures), tokens=tokens)
    return HealthyRun(str(seed), found, {"prefill_vs_train": sizes})


def test_what_is_proposed_holds_for_new_healthy_runs_and_is_coherent() -> None:
    proposal = calibrated([healthy(seed) for seed in range(20)], BASE)
    proposed = Contract.model_validate(tomllib.loads(proposal.toml))
    assert lint(proposed) == []
    assert proposed.limits[0].source.startswith("measured: 20 healthy runs, 40,000 tokens")
    alarms = [judge(healthy(seed).comparison, proposed).exit_code for seed in range(1000, 1300)]
    assert sum(alarms) <= 3
    faulty = [judge(healthy(s, scale=0.012).comparison, proposed).exit_code for s in range(50)]
    assert sum(faulty) == 50


def test_the_tail_is_that_of_the_tokens_that_were_seen() -> None:
    tail = fitted_tail([healthy(seed) for seed in range(20)])
    # Of an exponential: the quantile is scale · ln 100, the mean excess the scale.
    assert tail.value == pytest.approx(0.004 * np.log(100), rel=0.05)
    assert tail.scale == pytest.approx(0.004, rel=0.2)


def test_a_heavier_tail_than_exponential_is_bounded_by_what_was_seen() -> None:
    run = healthy(1)
    run.shifts["prefill_vs_train"][7] = 0.5
    assert fitted_tail([run]).bound(2000) > 0.5


def test_too_few_runs_are_refused() -> None:
    for runs in (
        [healthy(s) for s in range(9)],
        [healthy(s, tokens=100) for s in range(20)],
        [],
    ):
        with pytest.raises(BadOption, match="too few"):
            calibrated(runs, BASE)
    with pytest.raises(BadOption, match="the same run"):
        calibrated([healthy(1)] * 20, BASE)


def test_runs_that_are_not_healthy_are_refused() -> None:
    runs = [healthy(s) for s in range(20)]
    broken = comparison(edge(sites=[site(nonfinite=1)]))
    with pytest.raises(BadOption, match="not healthy"):
        calibrated([*runs, HealthyRun("nan", broken, {})], BASE)
    with pytest.raises(BadOption, match="float16"):
        calibrated([*runs, HealthyRun("half", comparison(dtype="float16"), {})], BASE)
    equal = [bit_equal(2000 + s) for s in range(20)]
    assert calibrated(equal, BASE).figures == []


def bit_equal(tokens: int) -> HealthyRun:
    found = comparison(edge(), tokens=tokens)
    return HealthyRun(str(tokens), found, {"prefill_vs_train": np.zeros(tokens)})


def test_rounding_up() -> None:
    given = (0.0123, 0.012, 3.01, 0.0, 99.1)
    assert [rounded_up(x) for x in given] == [0.013, 0.012, 3.1, 0.0, 100]
    assert MARGIN > 1


def test_a_limit_of_the_law_of_noise_is_proposed() -> None:
    """By the built-in contract, whose limits of tokens are those."""
    proposal = calibrated([healthy(seed) for seed in range(20)], open_contract("bf16"))
    proposed = {p.entry: p for p in proposal.figures}
    assert proposed["noise"].proposed > proposed["noise"].healthy > 0
    assert "noise-excess" not in proposed
