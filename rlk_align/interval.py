"""Estimates from sums over tokens, with intervals that are clustered by sequence.

A statistic is a ratio of two sums, or the quotient of two such ratios. The tokens of a sequence
share its state, so sequences are the independent units. The variance is that of the sequences'
influences (linearisation, Cochran 1977, chapter 6), and the degrees of freedom follow from the
effective number of sequences of equal weight (Kish 1965).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlk_align.moments import Moments

Floats = NDArray[np.float64]
DEVIATIONS = 4.0
"""Half the width of an interval in standard deviations of a normal law: 6 in 100,000 values are
outside, so that twenty checks of hundreds of healthy runs raise no alarm."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with the interval of the true value; NaN where nothing is known."""

    value: float
    low: float
    high: float

    def above(self, limit: float) -> bool:
        """Whether the whole interval is above a limit; false where nothing is known."""
        return self.low > limit

    def __neg__(self) -> "Estimate":
        return Estimate(-self.value, -self.high, -self.low)


UNKNOWN = Estimate(math.nan, math.nan, math.nan)


def ratio(numerators: Floats, denominators: Floats) -> Estimate:
    """Estimates Σ numerators / Σ denominators; each has an entry for each sequence."""
    total = float(denominators.sum())
    if not total > 0:
        return UNKNOWN
    value = float(numerators.sum()) / total
    half = _half_width((numerators - value * denominators) / total, denominators)
    return Estimate(value, value - half, value + half)


def quotient(a: tuple[Floats, Floats], b: tuple[Floats, Floats]) -> Estimate:
    """Estimates (Σ a₀ / Σ a₁) / (Σ b₀ / Σ b₁); each has an entry for each sequence. The interval is
    computed for the logarithm."""
    sums = [float(x.sum()) for x in (*a, *b)]
    if not all(s > 0 for s in sums):
        return UNKNOWN
    of_a, of_b = a[0] / sums[0] - a[1] / sums[1], b[0] / sums[2] - b[1] / sums[3]
    value = sums[0] / sums[1] / (sums[2] / sums[3])
    half = max(_half_width(of_a - of_b, a[1]), _half_width(of_a - of_b, b[1]))
    return _around(math.log(value), half)


def mean_factor(logs: Floats, others: Floats | None = None) -> Estimate:
    """Estimates the exponential of the mean of `logs`, or of its difference to the mean of
    `others`. Every sequence has one value and the same weight."""
    return factor(Moments.of(logs), None if others is None else Moments.of(others))


def factor(logs: Moments, others: Moments | None = None) -> Estimate:
    """Does the same for values whose moments are known (Welch 1947)."""
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
    """Estimates the share of `part` in `whole` independent units, with Wilson's interval (1927)."""
    if whole == 0:
        return UNKNOWN
    z2, p = DEVIATIONS**2, part / whole
    middle = (p + z2 / (2 * whole)) / (1 + z2 / whole)
    half = math.sqrt(p * (1 - p) / whole + z2 / (4 * whole**2)) * DEVIATIONS / (1 + z2 / whole)
    # A share of no units is exactly 0, regardless of rounding.
    low = max(0.0, middle - half) if part else 0.0
    return Estimate(p, low, min(1.0, middle + half) if part < whole else 1.0)


def _half_width(influences: Floats, weights: Floats) -> float:
    """Returns half the width of the interval of an estimate whose sequences have these influences
    and weights."""
    effective = float(weights.sum()) ** 2 / float((weights**2).sum())
    if not effective > 1.5:
        return math.inf
    carrying = np.count_nonzero(weights)
    squares = float((influences**2).sum()) * carrying / (carrying - 1)
    return student(effective - 1) * math.sqrt(squares)


def student(freedom: float) -> float:
    """Returns the quantile of Student's law that is as rare as DEVIATIONS under the normal law, by
    Wallace's approximation (1959), which errs towards wider intervals."""
    exponent = (DEVIATIONS * (8 * freedom + 3) / (8 * freedom + 1)) ** 2 / freedom
    return math.sqrt(freedom * math.expm1(min(exponent, 100.0)))
