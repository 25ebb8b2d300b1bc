"""Whether a live rotary embedding's frequencies were rounded, and to what."""

import pytest
import torch

from rlk_align.engines.common.attributes import rounded_frequencies

THETA = 1e4
EXACT = [THETA ** (-j / 32) for j in range(0, 32, 2)]
LIVE = torch.tensor(EXACT, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("widened", [False, True])
def test_rounded_ones_are_named(dtype: torch.dtype, widened: bool) -> None:
    live = LIVE.to(dtype)
    found = rounded_frequencies(live.float() if widened else live, EXACT, THETA)
    name = str(dtype).removeprefix("torch.")
    assert found == {"rope_frequencies": f"rounded to {name}", "rope_theta": THETA}


def test_healthy_ones_are_not() -> None:
    assert rounded_frequencies(LIVE, EXACT, THETA) == {}
    ulps = LIVE * (1 + 2.0**-22)
    assert rounded_frequencies(ulps, EXACT, THETA) == {}


def test_another_theta_is_no_rounding() -> None:
    other = torch.tensor([5e5 ** (-j / 32) for j in range(0, 32, 2)])
    assert rounded_frequencies(other, EXACT, THETA) == {}
    assert rounded_frequencies(other.bfloat16(), EXACT, THETA) == {}
    assert rounded_frequencies(LIVE[:-1].bfloat16(), EXACT, THETA) == {}


def test_frequencies_that_rounding_leaves_as_they_are() -> None:
    powers = [2.0**-j for j in range(16)]
    assert rounded_frequencies(torch.tensor(powers).bfloat16(), powers, 2.0**16) == {}
