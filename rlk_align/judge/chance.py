"""What chance alone makes of the figures of a healthy operator, at one rate of false alarms.

A run checks some figures of some hundreds of operators. `FALSE_ALARMS` is the probability that any
of them exceeds its bound by chance in a healthy run, and `CHECK_RATE` that of one of `CHECKS`.
"""

import math

FALSE_ALARMS = 1e-4
"""Of a whole run."""
CHECKS = 20_000
"""Figures that a run checks at most: nine of each operator of 36 layers, in three passes."""
CHECK_RATE = FALSE_ALARMS / CHECKS
MEASURED_FEATURES = 96
"""The features of the narrowest rows that the bounds of `row_rms` were measured on."""


def deviations(candidates: int) -> float:
    """How many standard errors the largest of so many sums of symmetric errors reaches: a sum over
    the root of its squares exceeds t with probability 2 exp(−t²/2) at most, whatever the law of the
    errors is (Efron 1969)."""
    return math.sqrt(2 * math.log(2 * max(1, candidates) / CHECK_RATE))


def widest_row(features: int, rows: int) -> float:
    """What the largest rms of so many rows is, in units of the rms of all: the mean of F squared
    normal errors exceeds 1 + 2 √(t/F) + 2 t/F with probability exp(−t) (Laurent and Massart
    2000)."""
    t = math.log(max(1, rows) / CHECK_RATE)
    return math.sqrt(1 + 2 * math.sqrt(t / features) + 2 * t / features)


def narrow_row_gain(features: int) -> float:
    """How much farther than a row of `MEASURED_FEATURES` a narrower one is scaled by chance, in
    roundings: F independent errors leave a factor of F^-1/2. Where the rows of a model are alike,
    the same chance is in all of them, and does not average out. A single feature has no factor."""
    return max(0.0, features**-0.5 - MEASURED_FEATURES**-0.5) if features > 1 else 0.0


def by_width(features: int, rows: int) -> float:
    """By what factor a bound on the rms of a row, measured on rows of `MEASURED_FEATURES`, grows
    for rows that are narrower, and shrinks for wider ones. Of a single feature a bound speaks as it
    is."""
    if features <= 1 or not rows:
        return 1.0
    return widest_row(features, rows) / widest_row(MEASURED_FEATURES, rows)
