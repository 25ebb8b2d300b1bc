"""Checks steps against their limits. A NaN fails, and a step without compared tokens is no pass."""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import pairwise

from rlk_align.interval import Moments
from rlk_align.logs.diagnose.contract import RunContract, StepLimit, TrendLimits
from rlk_align.logs.monitor.record import Finding, Interval, Level, StepRecord
from rlk_align.logs.monitor.trend import GrowingNoise, Growth, Rise, RisingK2


def step_findings(record: StepRecord, limits: Iterable[StepLimit]) -> Iterator[Finding]:
    """Yields the limits that a step breaks. A step without compared tokens is inconclusive."""
    if record.tokens == 0:
        yield Finding(
            level="inconclusive",
            name="vacuous",
            value=0.0,
            limit=1.0,
            why=f"no token was compared ({record.missing:,} scored tokens lack a log-prob): "
            "this step cannot be judged",
        )
    if record.not_finite:
        yield Finding(
            level="fail",
            name="not-finite",
            value=float(record.not_finite),
            limit=0.0,
            why=f"{record.not_finite:,} log-probs are NaN or infinite",
        )
    for limit in limits:
        interval = _value(record, limit)
        if interval is None:
            continue
        beyond = _beyond(interval)
        fail = limit.fail_at(record.tokens or 0)
        level = _level(beyond, min(limit.warn, fail), fail)
        if level:
            bound = limit.warn if level == "warn" else fail
            yield Finding(
                level=level, name=limit.name, value=interval.value, limit=bound, why=limit.why
            )


def _value(record: StepRecord, limit: StepLimit) -> Interval | None:
    """The limit's metric as an interval, without width for a plain value; None if it is unknown."""
    value: Interval | float | None
    if limit.metric == "missing_share":
        scored = (record.tokens or 0) + record.missing
        value = record.missing / scored if scored else None
    elif limit.metric == "k3" and record.k3 is None:
        value = record.k1 if record.k2 is None else record.k2
    else:
        value = getattr(record, limit.metric)
    return Interval.exactly(value) if isinstance(value, float) else value


def _beyond(interval: Interval) -> float:
    """The distance of the whole interval from 0; NaN if the value is NaN."""
    if math.isnan(interval.value):
        return math.nan
    if interval.low > 0:
        return interval.low
    return -interval.high if interval.high < 0 else 0.0


def _level(beyond: float, warn: float, fail: float) -> Level | None:
    if not beyond <= fail:
        return "fail"
    return None if beyond <= warn else "warn"


class Trends:
    """Finds trends over several steps, with a bounded number of steps in memory."""

    def __init__(self, contract: RunContract) -> None:
        self._limits = contract.trend
        self._k2 = RisingK2(contract)
        self._c = GrowingNoise(contract)
        self._lag_steps = int(contract.threshold("monitor.lag-steps"))
        self._lags: deque[tuple[int, float]] = deque(maxlen=self._lag_steps)

    def add(self, record: StepRecord) -> Iterator[Finding]:
        """Yields the trends that a step continues."""
        # A log of metrics may have only k3, which equals k2 if the policies are close.
        k2 = record.k2_scaled or record.k3
        rise = self._k2.add(record.step, k2)
        growth = self._c.add(record.step, record.noise_logs or Moments())
        rising = None
        if k2 is not None and rise is not None:
            rising = _rise_finding(rise, k2.value, self._limits)
            yield rising
        if (
            record.c is not None
            and growth is not None
            and (rising is None or rising.level != "fail")
        ):
            yield _growth_finding(growth, record.c.value)
        if record.version_lag is None:
            self._lags.clear()
            return
        self._lags.append((record.step, record.version_lag))
        lags = [lag for _, lag in self._lags]
        if len(lags) == self._lag_steps and all(b > a for a, b in pairwise(lags)):
            yield Finding(
                level="fail",
                name="growing-version-lag",
                value=lags[-1],
                limit=lags[0],
                since=self._lags[1][0],
                why="the weights that sample fall behind the trainer's with every step: check that "
                "they are still synced",
            )


def _growth_finding(growth: Growth, c: float) -> Finding:
    name, how = "shifted", "has changed at once"
    if growth.steady:
        name = "stale-weights"
        how = (
            "grows with the steps, as it does when the rollout's weights are not synced: compare "
            "them with `rlk-align weights`"
        )
    return Finding(
        level="fail",
        name=name,
        value=c,
        limit=c / growth.factor,
        since=growth.since,
        why=f"c {how}; in the last third of the steps it is {growth.factor:.3g} times that of the "
        "first third",
    )


def _rise_finding(rise: Rise, k2: float, limits: TrendLimits) -> Finding:
    level: Level = "warn" if rise.slow or rise.factor < limits.fail else "fail"
    if rise.slow:
        name = "slow-rise"
        why = "k2 is far above that of the run's first steps: look for what changed since"
    elif rise.monotone:
        name = "stale-weights"
        why = (
            "k2 rises from step to step, as it does when the rollout's weights are not synced: "
            "compare them with `rlk-align weights`"
        )
    else:
        name = "shifted"
        why = "k2 has changed abruptly: so did the weights, the precision or an engine's settings"
    factor = f"{rise.factor:.3g}" if rise.factor < 1000 else f"{rise.factor:,.0f}"
    return Finding(
        level=level,
        name=name,
        value=k2,
        limit=k2 / rise.factor,
        since=rise.since,
        why=f"{why}; it is {factor} times the level before step {rise.since}",
    )
