"""Trends of k2 and of the noise over the steps, and the steps at which they begin.

If weights are no longer synced, the rollout's weights fall behind the trainer's, and k2 grows with
the square of the distance. k2 is scaled by (1 − p)², so that a change of entropy does not look like
a trend. A step is compared with the median of earlier steps, and with their spread on a
logarithmic scale. Memory does not grow with the run."""

import math
import operator
from collections import deque
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

import numpy as np

from rlk_align.interval import factor
from rlk_align.logs.diagnose.contract import RunContract
from rlk_align.logs.monitor.record import Interval
from rlk_align.moments import Moments

BASELINE = 40
"""The largest number of steps of a level: the last ones or, for a slow rise, the first ones."""
TINY = 1e-12
"""The smallest k2 on the logarithmic scale."""


@dataclass(frozen=True, slots=True)
class Rise:
    """A rise of k2."""

    since: int
    """The first step above the earlier level."""
    factor: float
    """The last step's k2 over that level."""
    monotone: bool
    """Whether k2 rises continuously, as with weights that are not synced, and not at one step."""
    slow: bool = False
    """Whether the rise shows only in comparison with the run's first steps."""


@dataclass(frozen=True, slots=True)
class _Point:
    step: int
    log: float
    error: float
    """The standard deviation of `log` within the step."""


class RisingK2:
    """Finds a rise of k2; steps must be added in order."""

    def __init__(self, contract: RunContract) -> None:
        self.limits = contract.trend
        self._fewest = int(contract.threshold("monitor.level-steps"))
        self._recent = contract.threshold("monitor.rise-steps")
        self._agreed = contract.threshold("monitor.monotone")
        self._first: list[_Point] = []
        self._before: deque[_Point] = deque(maxlen=BASELINE)
        self._since: deque[_Point] = deque(maxlen=BASELINE)
        """Consecutive steps above the level."""
        self._began: int | None = None
        self._above_first = 0

    def add(self, step: int, k2: Interval | None) -> Rise | None:
        """Returns the rise that the step continues, or None. A step whose k2 is not finite is
        skipped."""
        if k2 is None or not math.isfinite(k2.value):
            return None
        half = (k2.high - k2.low) / 8  # an interval is four standard deviations to each side
        spread = half / max(k2.value, TINY)
        point = _Point(step, math.log(max(k2.value, TINY)), spread if spread < 1 else 1.0)
        if len(self._before) < self._fewest:
            rise = self._from_the_start(point)
        else:
            rise = self._above_the_level(point)
        slow = self._slowly(point)
        if len(self._first) < BASELINE:
            self._first.append(point)
        return rise or slow

    def _level(self, points: list[_Point]) -> tuple[float, float]:
        """The median and the standard deviation of steps, both from medians."""
        logs = np.array([p.log for p in points])
        middle = float(np.median(logs))
        return middle, 1.4826 * float(np.median(np.abs(logs - middle)))

    def _is_above(self, point: _Point, level: float, deviation: float) -> bool:
        return point.log > level + self.limits.spread * max(deviation, point.error)

    def _above_the_level(self, point: _Point) -> Rise | None:
        level, deviation = self._level([*self._before])
        if not self._is_above(point, level, deviation):
            # Steps that were above the level for a while belong to its spread.
            self._before.extend(self._since)
            self._before.append(point)
            self._since.clear()
            self._began = None
            return None
        self._since.append(point)
        self._began = self._since[0].step if self._began is None else self._began
        high = point.log >= max(level + math.log(self.limits.warn), math.log(self.limits.smallest))
        if len(self._since) < self._recent or not high:
            return None
        return Rise(self._began, math.exp(point.log - level), self._rises([*self._since]))

    def _rises(self, points: list[_Point]) -> bool:
        """Whether the later step is higher in most pairs of steps, and the last step is above the
        first one by more than their errors."""
        logs = np.array([p.log for p in points])
        later, earlier = np.triu_indices(len(logs), 1)[::-1]
        agreed = float((logs[later] > logs[earlier]).mean())
        noise = math.hypot(points[-1].error, points[0].error)
        return agreed >= self._agreed and logs[-1] - logs[0] > noise

    def _from_the_start(self, point: _Point) -> Rise | None:
        """The rise before there is a level: k2 rose with every step since the first one, by more
        than its intervals explain."""
        self._before.append(point)
        points = [*self._before]
        grown = point.log - points[0].log
        noise = self.limits.spread * math.hypot(point.error, points[0].error)
        enough = len(points) >= self._fewest - 1 and point.log >= math.log(self.limits.smallest)
        if not enough or grown < math.log(self.limits.slow_factor) or grown < noise:
            return None
        if any(b.log <= a.log for a, b in pairwise(points)):
            return None
        if len(points) == self._fewest:
            # The level of later steps is the first step.
            self._since.extend(points[1:])
            self._began = points[1].step
            self._before.clear()
            self._before.extend([points[0]] * self._fewest)
        return Rise(points[1].step, math.exp(grown), True)

    def _slowly(self, point: _Point) -> Rise | None:
        if len(self._first) < BASELINE:
            return None
        level, deviation = self._level(self._first)
        needed = max(level + math.log(self.limits.slow_factor), math.log(self.limits.smallest))
        above = point.log >= needed and self._is_above(point, level, deviation)
        self._above_first = self._above_first + 1 if above else 0
        if self._above_first < self._fewest:
            return None
        return Rise(self._first[-1].step + 1, math.exp(point.log - level), False, slow=True)


@dataclass(frozen=True, slots=True)
class Growth:
    """The growth of the noise from a run's first steps to its last ones."""

    since: int
    """The first of the last steps."""
    factor: float
    steady: bool
    """Whether the noise grew over several steps, and not at one."""


@dataclass(frozen=True, slots=True)
class _Noise:
    first: int
    """The first step of the part."""
    logs: Moments
    """The moments of the logarithm of c, over the answers of the part."""

    def __add__(self, other: "_Noise") -> "_Noise":
        return _Noise(self.first, self.logs + other.logs)


class GrowingNoise:
    """Tests whether c of the run's last third is above c of its first third, as `explain` does for
    the whole run; steps must be added in order. In a long run neighbouring steps are merged."""

    def __init__(self, contract: RunContract) -> None:
        self._contract = contract
        self._noise: list[_Noise] = []

    def add(self, step: int, logs: Moments) -> Growth | None:
        """Returns the growth that the step continues, or None. `logs` are the moments of the
        logarithm of c, over the step's answers."""
        if logs.count:
            self._noise.append(_Noise(step, logs))
        if len(self._noise) > 2 * BASELINE:
            pairs = zip(self._noise[::2], self._noise[1::2], strict=False)
            last = self._noise[-1:] if len(self._noise) % 2 else []
            self._noise = [a + b for a, b in pairs] + last
        needed = self._contract.threshold("stale-weights.steps")
        return self._growth() if len(self._noise) >= needed else None

    def _growth(self) -> Growth | None:
        limit, threshold = self._contract.limit, self._contract.threshold
        third = len(self._noise) // 3 or 1
        first, last = (_joined(part) for part in (self._noise[:third], self._noise[-third:]))
        grown = factor(last.logs, first.logs)
        negligible = math.exp(last.logs.mean) <= limit("numerics", "negligible")
        if negligible or not grown.above(limit("stale-weights")):
            return None
        parts = min(len(self._noise), int(threshold("stale-weights.parts")))
        ends = np.linspace(0, len(self._noise), parts + 1).astype(int)
        rises = np.diff([_joined(self._noise[a:b]).logs.mean for a, b in pairwise(ends)])
        if not np.mean(rises > 0) >= threshold("stale-weights.rises"):
            return None
        largest = threshold("monitor.one-rise") * rises[rises > 0].sum()
        steady = bool(rises.max() <= largest)
        return Growth(last.first, grown.value, steady)


def _joined(noise: list[_Noise]) -> _Noise:
    return reduce(operator.add, noise)
