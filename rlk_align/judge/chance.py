"""How large the statistics of a healthy operator become by chance, at one rate of false alarms.

A run checks several statistics of hundreds of operators. `FALSE_ALARMS` is the probability that any
of them exceeds its bound by chance in a healthy run. `CHECK_RATE` is that probability for one of
`CHECKS` statistics.
"""

import math

FALSE_ALARMS = 1e-4
"""The probability of a false alarm in a whole run."""
CHECKS = 20_000
"""The largest number of statistics that a run checks: nine for each operator of 36 layers, in three
passes."""
CHECK_RATE = FALSE_ALARMS / CHECKS
MEASURED_FEATURES = 96
"""The width of the narrowest rows on which the bounds of `row_rms` were measured."""


def deviations(candidates: int) -> float:
    """Returns how many standard errors the largest of `candidates` sums of symmetric errors
    reaches. A sum over the root of its squares exceeds t with a probability of at most 2
    exp(−t²/2), whatever the law of the errors (Efron 1969)."""
    return math.sqrt(2 * math.log(2 * max(1, candidates) / CHECK_RATE))


def widest_row(features: int, rows: int) -> float:
    """Returns the largest rms of a row among `rows`, in units of the rms of all rows. The mean of F
    squared normal errors exceeds 1 + 2 √(t/F) + 2 t/F with a probability of at most exp(−t)
    (Laurent and Massart 2000)."""
    t = math.log(max(1, rows) / CHECK_RATE)
    return math.sqrt(1 + 2 * math.sqrt(t / features) + 2 * t / features)


def narrow_row_gain(features: int) -> float:
    """Returns how much further a narrow row is scaled by chance than a row of `MEASURED_FEATURES`,
    in roundings. F independent errors amount to a factor of F^-1/2. Where the rows of a model are
    alike, all rows have the same factor, and it does not average out. A row of one feature has
    none."""
    return max(0.0, features**-0.5 - MEASURED_FEATURES**-0.5) if features > 1 else 0.0


def by_width(features: int, rows: int) -> float:
    """Returns the factor by which a bound on the rms of a row, measured on rows of
    `MEASURED_FEATURES`, grows for narrower rows and shrinks for wider ones. It is 1 for rows of one
    feature."""
    if features <= 1 or not rows:
        return 1.0
    return widest_row(features, rows) / widest_row(MEASURED_FEATURES, rows)
