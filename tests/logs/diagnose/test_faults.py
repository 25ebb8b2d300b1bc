"""Every planted fault is named correctly, and healthy runs raise no alarm."""

import dataclasses

import numpy as np
import pytest
from explained import CONTRACT, explained
from other_noise import SHAPES, healthy_shape
from simulate_dumps import FAULTS, NOISE, faulty, healthy

from rlk_align.logs.diagnose.explain import explain

LARGE = {"stale cache, nothing dumped", "routes flip"}
"""Faults that only many groups, or many tokens, distinguish from others."""


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name: str, seed: int) -> None:
    found = explained(faulty(name, seed, 100_000 if name in LARGE else 20_000))
    assert [d.name for d in found.diagnoses][:1] == [FAULTS[name].diagnosis]
    assert found.exit_code == (4 if FAULTS[name].diagnosis == "vacuous" else 1)
    first = found.diagnoses[0]
    assert first.low <= first.value <= first.high
    assert first.low > first.limit
    assert first.samples or first.name == "vacuous"


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("dtype", NOISE)
@pytest.mark.parametrize("tokens", [2_000, 20_000])
def test_a_healthy_run_passes(tokens: int, dtype: str, turns: int) -> None:
    for seed in range(3):
        found = explained(healthy(seed, tokens, dtype, turns))
        assert [d.name for d in found.diagnoses] == ["numerics"]
        assert found.exit_code == 0
        assert found.mean_ratio.low <= 1 <= found.mean_ratio.high


def test_the_noise_is_as_published() -> None:
    for seed in range(5):
        found = explained(healthy(seed, 50_000))
        assert 0.028 < found.c.value < 0.08


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["rollout", "train"])
def test_one_value_that_is_not_finite_fails(side: str, value: float) -> None:
    run = healthy(0, 20_000)
    place = int(np.flatnonzero(run.compared)[777])
    getattr(run, side)[place] = value
    found = explained(run)
    assert found.diagnoses[0].name == "missing"
    assert found.exit_code == 1
    assert found.counts.not_finite == 1
    token = found.diagnoses[0].samples[0]
    sequence = int(np.searchsorted(run.offsets, place, side="right")) - 1
    assert token.id == run.ids[sequence]
    assert token.position == place - run.offsets[sequence]


def test_few_tokens_conclude_nothing() -> None:
    run = healthy(0, 2_000).take(np.arange(4))
    found = explained(run)
    assert found.exit_code == 4
    assert "500 needed" in found.doubts[0]


def test_no_sequence_is_never_a_pass() -> None:
    for batches in ([], [healthy(0, 2_000).take(np.arange(0))]):
        found = explain(batches, CONTRACT)
        assert found.exit_code == 4
        assert found.diagnoses[0].name == "vacuous"


def test_a_large_error_without_a_cause_is_no_pass() -> None:
    """If one of few sequences is far off, no cause is named, and the run does not pass."""
    run = healthy(3, 2_000).take(np.arange(8))
    spoiled = slice(run.offsets[0], run.offsets[1])
    where = run.compared[spoiled]
    run.train[spoiled][where] = np.minimum(run.train[spoiled][where] * 3 - 1, 0.0)
    assert explained(run).exit_code in (1, 4)


def test_batches_make_no_difference() -> None:
    run = faulty("quantised", 0, 20_000)
    whole = explained(run)
    parts = explain((run.take(k) for k in np.array_split(np.arange(len(run)), 5)), CONTRACT)
    assert [d.model_dump() for d in parts.diagnoses] == [d.model_dump() for d in whole.diagnoses]
    assert parts.mean_ratio.value == pytest.approx(whole.mean_ratio.value, abs=1e-12)


def test_what_was_dumped_is_not_changed() -> None:
    run = faulty("T on the rollout only", 0, 2_000)
    before = {f.name: getattr(run, f.name) for f in dataclasses.fields(run)}
    copies = {k: v.copy() for k, v in before.items() if isinstance(v, np.ndarray)}
    explained(run)
    for name, value in copies.items():
        np.testing.assert_array_equal(value, before[name])


def test_nan_at_every_edge_of_the_mask_is_no_wrong_mask() -> None:
    run = healthy(0, 20_000)
    run.train[run.offsets[1:] - 1] = np.nan
    found = explained(run)
    assert found.diagnoses[0].name == "missing"
    assert found.exit_code == 1


@pytest.mark.parametrize("dtype", NOISE)
@pytest.mark.parametrize("shape", SHAPES)
def test_healthy_noise_of_another_shape_passes(shape: str, dtype: str) -> None:
    for seed in range(2):
        found = explained(healthy_shape(shape, seed, 10_000, dtype, turns=1 + seed))
        assert [d.name for d in found.diagnoses] == ["numerics"]
        assert found.exit_code == 0
