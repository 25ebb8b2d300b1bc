"""The law of healthy noise: one c for sure and unsure tokens, and what stands out of it."""

import math

import numpy as np
import pytest

from rlk_align.compare.token_noise import token_noise


def tokens(c: float, count: int = 4000, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-probs of both sides with noise of that c, and the sequences of 40 tokens."""
    draw = np.random.default_rng(seed)
    p = draw.beta(1.0, 0.6, count)
    delta = c * (1 - p) * draw.normal(size=count) * math.sqrt(math.pi / 2)
    logp = np.log(p)
    return logp, np.minimum(logp + delta, 0.0), np.arange(count) // 40


@pytest.mark.parametrize("c", [1e-6, 0.005, 0.04])
def test_c_is_found(c: float) -> None:
    first, second, sequence = tokens(c)
    noise = token_noise(first, second, sequence)
    assert noise.c_low < c < noise.c_high
    assert noise.c == pytest.approx(c, rel=0.1)
    assert noise.ratio_low < 1 < noise.ratio_high
    assert noise.sequences == 100
    # Of 4,000 normal errors hardly one is 6 times the mean one.
    assert noise.largest < 6 * c


def test_one_token_stands_out() -> None:
    first, second, sequence = tokens(0.01)
    second[1234] -= 3.0
    noise = token_noise(first, second, sequence)
    assert noise.largest > 100 * noise.c


def test_a_sure_token_counts_by_a_hundredth_at_least() -> None:
    noise = token_noise(np.array([-1e-9, -1.0]), np.array([-1e-4, -1.0]), np.array([0, 1]))
    assert noise.largest == pytest.approx(1e-2, rel=1e-3)


def test_equal_sides_have_none() -> None:
    first, _, sequence = tokens(0.01)
    noise = token_noise(first, first, sequence)
    assert (noise.c, noise.c_low, noise.c_high, noise.largest) == (0.0, 0.0, 0.0, 0.0)
    assert noise.ratio_low == noise.ratio_high == 1.0


def test_one_sequence_has_no_interval() -> None:
    first, second, sequence = tokens(0.01)
    noise = token_noise(first, second, sequence * 0)
    assert noise.c > 0
    assert math.isnan(noise.c_low)
    assert math.isnan(noise.c_high)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_what_is_not_finite_is_not_a_number(value: float) -> None:
    first, second, sequence = tokens(0.01)
    second[7] = value
    assert math.isnan(token_noise(first, second, sequence).largest) or value < 0
    assert not token_noise(first, second, sequence).c <= 1e9
