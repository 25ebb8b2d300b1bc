"""Monitored runs: planted faults are named, and healthy steps raise no alarm."""

import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from simulate_dumps import GROUP, Dump
from simulated_steps import Loop

from rlk_align.data import data_path
from rlk_align.errors import BadOption
from rlk_align.logs.diagnose.contract import load_run_contract
from rlk_align.logs.diagnose.explain import explain
from rlk_align.logs.dumps.sequences import Sequences
from rlk_align.logs.monitor.export import scalars
from rlk_align.logs.monitor.record import Interval, StepRecord
from rlk_align.logs.monitor.run_monitor import RunMonitor


def watched(loop: Loop, count: int) -> tuple[RunMonitor, list[StepRecord]]:
    monitor = RunMonitor()
    return monitor, [monitor.arrays(s, g, t, np.ones_like(g)) for s, g, t in loop.steps(count)]


def first(records: list[StepRecord], name: str) -> int | None:
    return next((r.step for r in records if any(f.name == name for f in r.findings)), None)


@pytest.mark.parametrize("seed", range(6))
def test_weights_that_are_not_synced_from_step_25_on_are_named_by_step_30(seed: int) -> None:
    monitor, records = watched(Loop(seed=seed, learning_rate=32, batch=128, stale_from=25), 50)
    assert not [f for r in records[:26] for f in r.findings]
    named = first(records, "stale-weights")
    assert named is not None
    assert named <= 30
    [finding] = [f for f in records[named].findings if f.name == "stale-weights"]
    assert finding.since is not None
    assert 25 <= finding.since <= named
    assert "stale-weights" in {f.name for f in records[-1].findings}
    assert monitor.exit_code == 1


@pytest.mark.parametrize("seed", range(4))
def test_weights_that_were_never_synced_are_named(seed: int) -> None:
    _, records = watched(Loop(seed=seed, learning_rate=48, noise=0.01, batch=128, stale_from=0), 20)
    named = first(records, "stale-weights")
    assert named is not None
    assert named <= 10


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("learning_rate", [2, 32])
def test_a_healthy_run_raises_no_alarm(seed: int, learning_rate: float) -> None:
    """With a large learning rate the entropy falls strongly, which is not a trend."""
    monitor, records = watched(Loop(seed=seed, learning_rate=learning_rate), 150)
    assert not [f for r in records for f in r.findings]
    assert monitor.exit_code == 0
    assert not monitor.stop


def test_noise_that_changes_at_once_is_no_staleness() -> None:
    loop = Loop()
    monitor = RunMonitor()
    for step, g, t in loop.steps(40):
        loop.noise = 0.05 if step < 19 else 0.2
        record = monitor.arrays(step, g, t, np.ones_like(g))
    names = {f.name for f in record.findings}
    assert "shifted" in names
    assert "stale-weights" not in names


def test_a_temperature_on_one_side_moves_the_mean_ratio() -> None:
    monitor = RunMonitor()
    for step, g, t in Loop(batch=512).steps(5):
        record = monitor.arrays(step, 1.3 * g, t, np.ones_like(g))
    assert "ratio-mean" in {f.name for f in record.findings if f.level == "fail"}


def test_one_wrong_token_is_named_in_its_step() -> None:
    monitor = RunMonitor()
    for step, g, t in Loop(batch=512).steps(5):
        if step == 3:
            t.flat[np.argmin(np.abs(g + 0.5))] -= 8.0
        record = monitor.arrays(step, g, t, np.ones_like(g))
        assert [f.name for f in record.findings] == (["single-token"] if step == 3 else [])


def test_a_growing_version_lag_is_named() -> None:
    monitor = RunMonitor()
    found = []
    for step, g, t in Loop().steps(12):
        versions = np.full(len(g), min(step, 5))
        record = monitor.arrays(
            step, g, t, np.ones_like(g), rollout_versions=versions, train_version=step + 1
        )
        found.append("growing-version-lag" in {f.name for f in record.findings})
    assert found == [False] * 9 + [True] * 3


def test_one_wrong_token_is_named_where_the_rollout_is_sure_of_every_token() -> None:
    monitor = RunMonitor()
    g = np.full((64, 64), 1e-9)  # above 0 by rounding: 1 − p is 0 for every token, and c is unknown
    t = g.copy()
    assert not monitor.arrays(0, g, t, np.ones_like(g)).findings
    t[3, 4] = -1.0
    record = monitor.arrays(1, g, t, np.ones_like(g))
    assert record.c is None
    assert "single-token" in {f.name for f in record.findings}
    assert scalars(record)["excess"] == record.excess


def test_nan_fails_and_nothing_compared_is_no_pass() -> None:
    monitor = RunMonitor()
    assert monitor.exit_code == 4
    _, g, t = next(Loop().steps(1))
    t[3, 4] = math.nan
    record = monitor.arrays(0, g, t, np.ones_like(g))
    assert record.not_finite == 1
    assert {"not-finite", "ratio-mean", "noise", "k3"} <= {f.name for f in record.findings}
    assert monitor.exit_code == 1
    record = monitor.arrays(1, g, t, np.zeros_like(g))
    assert [f.name for f in record.findings] == ["vacuous"]
    assert monitor.exit_code == 4


def test_stopping_early_waits_for_its_patience() -> None:
    monitor = RunMonitor(patience=2)
    _, g, t = next(Loop().steps(1))
    bad = t - 1
    stops = []
    for step, train in enumerate([t, bad, t, bad, bad]):
        monitor.arrays(step, g, train, np.ones_like(g))
        stops.append(monitor.stop)
    assert stops == [False, False, False, False, True]


def test_shapes_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(BadOption, match="shape"):
        RunMonitor().arrays(0, np.zeros((2, 3)), np.zeros((2, 4)), np.zeros((2, 3)))


def test_memory_is_constant_over_10_000_steps() -> None:
    monitor = RunMonitor()
    rng = np.random.default_rng(0)

    def step(n: int) -> None:
        k2 = 1e-3 * math.exp(0.1 * rng.normal())
        value = Interval(value=k2, low=0.8 * k2, high=1.2 * k2)
        monitor.record(StepRecord(step=n, sequences=9, tokens=99, k2_scaled=value, version_lag=1.0))

    for n in range(500):
        step(n)
    tracemalloc.start()
    for n in range(500, 10_000):
        step(n)
    # Allocations by other threads of this process do not count.
    own = tracemalloc.Filter(True, "*/rlk_align/*")
    held = tracemalloc.take_snapshot().filter_traces([own]).statistics("filename")
    tracemalloc.stop()
    assert monitor.steps == 10_000
    assert sum(file.size for file in held) < 50_000


def test_a_contract_of_ones_own_is_asked(tmp_path: Path) -> None:
    shipped = (data_path("contracts") / "run.toml").read_text(encoding="utf-8")
    stricter = tmp_path / "mine.toml"
    stricter.write_text(shipped.replace("warn = 0.072\nfail = 0.09", "warn = 0.001\nfail = 0.002"))
    for contract, code in ((None, 0), (load_run_contract(str(stricter)), 1)):
        monitor = RunMonitor(contract)
        rng = np.random.default_rng(0)
        g = -rng.exponential(1.0, (32, 64)) - 1e-3
        monitor.arrays(0, g, g + 0.04 * -np.expm1(g) * rng.standard_normal(g.shape), g < 0)
        assert monitor.exit_code == code


def steps_of(run: Sequences) -> tuple[RunMonitor, list[StepRecord]]:
    monitor = RunMonitor()
    parts = ((s, run.take(np.flatnonzero(run.steps == s))) for s in np.unique(run.steps))
    return monitor, [monitor.sequences(int(s), [part]) for s, part in parts]


@pytest.mark.parametrize("value", [None, 0.0, -9999.0])
@pytest.mark.parametrize("side", ["rollout", "train"])
def test_one_scored_token_without_a_log_prob_fails(side: str, value: float | None) -> None:
    run = Dump(3, 20_000).sequences_of()
    assert steps_of(run)[0].exit_code == 0
    place = int(np.flatnonzero(run.compared & (run.train < -0.5) & (run.rollout < -0.5))[4])
    getattr(run, side)[place] = math.nan if value is None else value
    getattr(run, f"{side}_missing")[place] = value is None
    monitor, records = steps_of(run)
    assert [[f.name for f in r.findings] for r in records] == [["missing"], *[[]] * 5]
    assert records[0].missing == 1
    assert monitor.exit_code == 1


def test_zeros_of_a_law_that_both_sides_truncate_are_log_probs() -> None:
    dump = Dump(3, 20_000)
    dump.top_p = 0.9
    assert steps_of(dump.sequences_of())[0].exit_code == 0


def test_copies_of_samples_fail() -> None:
    run = Dump(3, 20_000).sequences_of()
    copies = run.take(np.arange(len(run)) // GROUP * GROUP)
    monitor, records = steps_of(copies)
    assert "duplicated" in {f.name for f in records[0].findings}
    assert records[0].duplicated == 1.0
    assert monitor.exit_code == 1


@pytest.mark.parametrize("steps", [6, 8, 20])
@pytest.mark.parametrize("seed", range(3))
def test_stale_weights_that_explain_fails_do_not_pass(seed: int, steps: int) -> None:
    dump = Dump(seed, 60_000, steps=steps)
    dump.margin = 0.2 / steps * dump.steps[dump.sequence]
    run = dump.sequences_of()
    assert explain([run], load_run_contract()).diagnoses[0].name == "stale-weights"
    monitor, records = steps_of(run)
    assert "stale-weights" in {f.name for r in records for f in r.findings if f.level == "fail"}
    assert monitor.exit_code == 1


@pytest.mark.parametrize("steps", [6, 8, 20])
def test_a_healthy_run_of_few_steps_has_no_trend(steps: int) -> None:
    for seed in range(5):
        assert steps_of(Dump(seed, 40_000, steps=steps).sequences_of())[0].exit_code == 0
