"""Estimates from sums over tokens, with intervals that are clustered by sequence.

A statistic is a ratio of two sums, or the quotient of two such ratios. Tokens of one sequence
share its state, so sequences are the independent units: the variance is that of the sequences'
influences (linearisation, Cochran 1977, chapter 6), and the degrees of freedom are those of as many
sequences of equal weight (Kish 1965).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
DEVIATIONS = 4.0
"""Half the width of an interval in standard deviations of a normal law: 6 in 100,000 lie outside,
so that some twenty questions put to hundreds of healthy runs raise no alarm."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with the interval that the true one lies in; NaN where nothing can be said."""

    value: float
    low: float
    high: float

    def above(self, limit: float) -> bool:
        """Whether the whole interval is above; never where nothing can be said."""
        return self.low > limit

    def __neg__(self) -> "Estimate":
        return Estimate(-self.value, -self.high, -self.low)


UNKNOWN = Estimate(math.nan, math.nan, math.nan)


def ratio(numerators: Floats, denominators: Floats) -> Estimate:
    """Σ numerators / Σ denominators, each a figure of a sequence."""
    total = float(denominators.sum())
    if not total > 0:
        return UNKNOWN
    value = float(numerators.sum()) / total
    half = _half_width((numerators - value * denominators) / total, denominators)
    return Estimate(value, value - half, value + half)


def quotient(a: tuple[Floats, Floats], b: tuple[Floats, Floats]) -> Estimate:
    """(Σ a₀ / Σ a₁) / (Σ b₀ / Σ b₁), each a figure of a sequence; the interval is that of its
    logarithm."""
    sums = [float(x.sum()) for x in (*a, *b)]
    if not all(s > 0 for s in sums):
        return UNKNOWN
    of_a, of_b = a[0] / sums[0] - a[1] / sums[1], b[0] / sums[2] - b[1] / sums[3]
    value = sums[0] / sums[1] / (sums[2] / sums[3])
    half = max(_half_width(of_a - of_b, a[1]), _half_width(of_a - of_b, b[1]))
    return _around(math.log(value), half)


@dataclass(frozen=True, slots=True)
class Moments:
    """How many figures there are, their mean, and the sum of their squared deviations from it."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Floats) -> "Moments":
        """Those of some figures."""
        if not len(values):
            return cls()
        return cls(len(values), float(values.mean()), float(values.var()) * len(values))

    def __add__(self, other: "Moments") -> "Moments":
        """Those of both together (Chan, Golub and LeVeque 1979)."""
        count = self.count + other.count
        if not count:
            return self
        apart = other.mean - self.mean
        mean = self.mean + apart * other.count / count
        between = apart**2 * self.count * other.count / count
        return Moments(count, mean, self.squares + other.squares + between)


def mean_factor(logs: Floats, others: Floats | None = None) -> Estimate:
    """The exponential of the mean of `logs`, or of how far it is above that of `others`: figures of
    sequences that weigh alike, so that none decides alone."""
    return factor(Moments.of(logs), None if others is None else Moments.of(others))


def factor(logs: Moments, others: Moments | None = None) -> Estimate:
    """The same of figures whose moments are known (Welch 1947)."""
    groups = [logs] if others is None else [logs, others]
    if any(x.count < 2 for x in groups):
        return UNKNOWN
    errors = [x.squares / (x.count - 1) / x.count for x in groups]
    middle = logs.mean - (0.0 if others is None else others.mean)
    below = sum(v**2 / (x.count - 1) for v, x in zip(errors, groups, strict=True))
    freedom = sum(errors) ** 2 / below if below > 0 else float(min(x.count for x in groups) - 1)
    return _around(middle, student(freedom) * math.sqrt(sum(errors)))


def _around(middle: float, half: float) -> Estimate:
    ends = (math.exp(max(-700.0, min(700.0, middle + s * half))) for s in (0, -1, 1))
    return Estimate(*ends)


def share(part: int, whole: int) -> Estimate:
    """`part` of `whole` independent units, with Wilson's interval (1927)."""
    if whole == 0:
        return UNKNOWN
    z2, p = DEVIATIONS**2, part / whole
    middle = (p + z2 / (2 * whole)) / (1 + z2 / whole)
    half = math.sqrt(p * (1 - p) / whole + z2 / (4 * whole**2)) * DEVIATIONS / (1 + z2 / whole)
    # None of them is exactly 0, whatever the sums round to.
    low = max(0.0, middle - half) if part else 0.0
    return Estimate(p, low, min(1.0, middle + half) if part < whole else 1.0)


def _half_width(influences: Floats, weights: Floats) -> float:
    """Half the width of the interval of an estimate whose sequences have these influences; as many
    as would weigh alike count."""
    effective = float(weights.sum()) ** 2 / float((weights**2).sum())
    if not effective > 1.5:
        return math.inf
    carrying = np.count_nonzero(weights)
    squares = float((influences**2).sum()) * carrying / (carrying - 1)
    return student(effective - 1) * math.sqrt(squares)


def student(freedom: float) -> float:
    """The quantile of Student's law that is as rare as DEVIATIONS is under the normal law, by
    Wallace's approximation (1959), which errs to the wide side."""
    exponent = (DEVIATIONS * (8 * freedom + 3) / (8 * freedom + 1)) ** 2 / freedom
    return math.sqrt(freedom * math.expm1(min(exponent, 100.0)))
