"""Whether k2 rises over the steps, and since when.

When weights are not synced any more, the rollout's fall behind the trainer's, and k2 grows with the
square of the distance. k2 is scaled by (1 − p)², so that a change of entropy does not look like a
trend. A step is compared with the steps before it: with their median, and their spread on a
logarithmic scale. Memory does not grow with the run."""

import math
import operator
from collections import deque
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

import numpy as np

from rlk_align.interval import Moments, factor
from rlk_align.logs.diagnose.contract import TrendLimits
from rlk_align.logs.monitor.record import Interval

RECENT = 3
"""Steps in a row that must be above before a rise is named."""
FEWEST = 6
"""Steps that a level is taken from, at least."""
BASELINE = 40
"""Steps that a level is taken from, at most: those that came last, or first for a slow rise."""
FEWEST_OF_TREND = 5
"""Steps that show whether noise grows over a run, at least."""
PARTS, RISES, ONE_RISE = 6, 0.6, 0.6
"""A run is cut into so many parts, most of which are above the one before; where one rise makes
more than this part of all, noise has changed at once."""
TINY = 1e-12
"""What a k2 of 0 counts as on the logarithmic scale."""


@dataclass(frozen=True, slots=True)
class Rise:
    """A rise of k2."""

    since: int
    """The first step above the level before."""
    factor: float
    """The last step's k2 over that level."""
    monotone: bool
    """Whether k2 goes on rising, as it does with weights that are not synced; else it has changed
    once, and stays there."""
    slow: bool = False
    """Whether it is seen only against the run's first steps."""


@dataclass(frozen=True, slots=True)
class _Point:
    step: int
    log: float
    error: float
    """The standard deviation of `log` within the step."""


class RisingK2:
    """Steps go in, in order; `add` says whether k2 rises."""

    def __init__(self, limits: TrendLimits) -> None:
        self.limits = limits
        self._first: list[_Point] = []
        self._before: deque[_Point] = deque(maxlen=BASELINE)
        self._since: deque[_Point] = deque(maxlen=BASELINE)
        """Steps above the level, one after the other, once there is a level."""
        self._began: int | None = None
        self._above_first = 0

    def add(self, step: int, k2: Interval | None) -> Rise | None:
        """Returns the rise that the step continues; None where there is none. A step whose k2 is
        not finite is left out."""
        if k2 is None or not math.isfinite(k2.value):
            return None
        half = (k2.high - k2.low) / 8  # an interval is four standard deviations to each side
        spread = half / max(k2.value, TINY)
        point = _Point(step, math.log(max(k2.value, TINY)), spread if spread < 1 else 1.0)
        if len(self._before) < FEWEST:
            rise = self._from_the_start(point)
        else:
            rise = self._above_the_level(point)
        slow = self._slowly(point)
        if len(self._first) < BASELINE:
            self._first.append(point)
        return rise or slow

    def _level(self, points: list[_Point]) -> tuple[float, float]:
        """The median and the standard deviation of steps, from their median deviation."""
        logs = np.array([p.log for p in points])
        middle = float(np.median(logs))
        return middle, 1.4826 * float(np.median(np.abs(logs - middle)))

    def _is_above(self, point: _Point, level: float, deviation: float) -> bool:
        return point.log > level + self.limits.spread * max(deviation, point.error)

    def _above_the_level(self, point: _Point) -> Rise | None:
        level, deviation = self._level([*self._before])
        if not self._is_above(point, level, deviation):
            # What was above for a while is part of the level's spread.
            self._before.extend(self._since)
            self._before.append(point)
            self._since.clear()
            self._began = None
            return None
        self._since.append(point)
        self._began = self._since[0].step if self._began is None else self._began
        high = point.log >= max(level + math.log(self.limits.warn), math.log(self.limits.smallest))
        if len(self._since) < RECENT or not high:
            return None
        return Rise(self._began, math.exp(point.log - level), _rises([*self._since]))

    def _from_the_start(self, point: _Point) -> Rise | None:
        """Before there is a level: a k2 that rose with every step since the first, beyond what its
        intervals explain."""
        self._before.append(point)
        points = [*self._before]
        grown = point.log - points[0].log
        noise = self.limits.spread * math.hypot(point.error, points[0].error)
        enough = len(points) >= FEWEST - 1 and point.log >= math.log(self.limits.smallest)
        if not enough or grown < math.log(self.limits.slow_factor) or grown < noise:
            return None
        if any(b.log <= a.log for a, b in pairwise(points)):
            return None
        if len(points) == FEWEST:
            # The steps after it go on rising; the first is the level that they are held against.
            self._since.extend(points[1:])
            self._began = points[1].step
            self._before.clear()
            self._before.extend([points[0]] * FEWEST)
        return Rise(points[1].step, math.exp(grown), True)

    def _slowly(self, point: _Point) -> Rise | None:
        if len(self._first) < BASELINE:
            return None
        level, deviation = self._level(self._first)
        needed = max(level + math.log(self.limits.slow_factor), math.log(self.limits.smallest))
        above = point.log >= needed and self._is_above(point, level, deviation)
        self._above_first = self._above_first + 1 if above else 0
        if self._above_first < FEWEST:
            return None
        return Rise(self._first[-1].step + 1, math.exp(point.log - level), False, slow=True)


@dataclass(frozen=True, slots=True)
class Growth:
    """The noise of a run's last steps, held against that of its first ones."""

    since: int
    """The first of the last steps."""
    factor: float
    steady: bool
    """Whether it grew over several steps, and not at one."""


@dataclass(frozen=True, slots=True)
class _Noise:
    first: int
    """The first step that is in it."""
    logs: Moments
    """Of the logarithms of c of its answers."""

    def __add__(self, other: "_Noise") -> "_Noise":
        return _Noise(self.first, self.logs + other.logs)


class GrowingNoise:
    """Steps go in, in order; `add` says whether c of the run's last third is above that of its
    first, which is what `explain` asks of the whole run. Of a run of many steps a few in a row are
    held as one."""

    def __init__(self, limit: float, negligible: float) -> None:
        self._limit, self._negligible = limit, negligible
        self._noise: list[_Noise] = []

    def add(self, step: int, logs: Moments) -> Growth | None:
        """Returns the growth that the step continues; None where there is none. `logs` are the
        moments of the logarithms of c of the step's answers."""
        if logs.count:
            self._noise.append(_Noise(step, logs))
        if len(self._noise) > 2 * BASELINE:
            pairs = zip(self._noise[::2], self._noise[1::2], strict=False)
            last = self._noise[-1:] if len(self._noise) % 2 else []
            self._noise = [a + b for a, b in pairs] + last
        return self._growth() if len(self._noise) >= FEWEST_OF_TREND else None

    def _growth(self) -> Growth | None:
        third = len(self._noise) // 3 or 1
        first, last = (_joined(part) for part in (self._noise[:third], self._noise[-third:]))
        grown = factor(last.logs, first.logs)
        if math.exp(last.logs.mean) <= self._negligible or not grown.above(self._limit):
            return None
        ends = np.linspace(0, len(self._noise), min(len(self._noise), PARTS) + 1).astype(int)
        rises = np.diff([_joined(self._noise[a:b]).logs.mean for a, b in pairwise(ends)])
        if not np.mean(rises > 0) >= RISES:
            return None
        steady = bool(rises.max() <= ONE_RISE * rises[rises > 0].sum())
        return Growth(last.first, grown.value, steady)


def _joined(noise: list[_Noise]) -> _Noise:
    return reduce(operator.add, noise)


def _rises(points: list[_Point]) -> bool:
    """Whether the later of two steps is the higher one in at least 8 of 10 pairs, and the last
    steps are above the first by more than their errors explain."""
    logs = np.array([p.log for p in points])
    later, earlier = np.triu_indices(len(logs), 1)[::-1]
    agreed = float((logs[later] > logs[earlier]).mean())
    return agreed >= 0.8 and logs[-1] - logs[0] > math.hypot(points[-1].error, points[0].error)
