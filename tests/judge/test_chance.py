"""What chance makes of figures: never exceeded by what is drawn, and not far above it."""

import numpy as np
import pytest

from rlk_align.judge.chance import (
    CHECK_RATE,
    CHECKS,
    FALSE_ALARMS,
    by_width,
    deviations,
    widest_row,
)

DRAWS = 100_000


def test_the_rate_is_that_of_a_run() -> None:
    assert pytest.approx(FALSE_ALARMS) == CHECK_RATE * CHECKS


@pytest.mark.parametrize("features", [1, 4, 16, 32, 64, 256, 1024])
def test_no_row_of_normal_errors_is_wider(features: int) -> None:
    """Of 100,000 rows a width; chi-square stands for the sum of so many squared errors."""
    draw = np.random.default_rng(features)
    largest = float(np.sqrt(draw.chisquare(features, DRAWS).max() / features))
    assert largest <= widest_row(features, DRAWS) <= 2 * largest


@pytest.mark.parametrize("law", ["uniform", "normal", "heavy"])
@pytest.mark.parametrize("terms", [4, 64, 1000])
def test_no_sum_is_further_off_than_its_own_squares_allow(law: str, terms: int) -> None:
    draw = np.random.default_rng(terms)
    shape = (DRAWS // 10, terms)
    drawn = {
        "uniform": lambda: draw.uniform(-1, 1, shape),
        "normal": lambda: draw.normal(size=shape),
        "heavy": lambda: draw.standard_cauchy(shape),
    }[law]()
    reached = np.abs(drawn.sum(1)) / np.sqrt((drawn**2).sum(1))
    assert float(reached.max()) <= deviations(DRAWS // 10)


def test_wider_rows_have_tighter_bounds() -> None:
    factors = [by_width(features, 1500) for features in (8, 32, 96, 512, 4096)]
    assert factors == sorted(factors, reverse=True)
    assert by_width(96, 1500) == 1.0
    assert by_width(1, 1500) == by_width(0, 10) == by_width(64, 0) == 1.0
