"""The introduced and the inherited difference add up to the observed one exactly."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlk_align.probe.exact_difference import exact_difference, split_difference

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
finite = st.floats(allow_nan=False, allow_infinity=False, width=32)


def rounded(values: list[float], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).clamp(-6e4, 6e4).to(dtype)


@given(st.lists(st.tuples(finite, finite, finite), min_size=1), *[st.sampled_from(DTYPES)] * 2)
def test_they_add_up_to_the_last_bit(
    rows: list[tuple[float, float, float]], first: torch.dtype, second: torch.dtype
) -> None:
    a_on_a = rounded([r[0] for r in rows], first)
    b_on_a, b_on_b = (rounded([r[i] for r in rows], second) for i in (1, 2))
    introduced, inherited, errors = split_difference(a_on_a, b_on_a, b_on_b)
    for i in range(len(rows)):
        parts = [float(x[i]) for x in (introduced, inherited, errors[0], errors[1])]
        # fsum rounds the exact sum once, and so does the one subtraction.
        assert math.fsum(parts) == float(a_on_a[i]) - float(b_on_b[i])


@given(st.lists(finite, min_size=2, max_size=2))
def test_nearby_values_lose_nothing(pair: list[float]) -> None:
    x, y = (torch.tensor([v]).clamp(2.0**-14, 2.0**14) for v in pair)
    d, error = exact_difference(x, y)
    assert float(error) == 0
    assert float(d) == float(x) - float(y)


def test_what_float64_cannot_hold_is_in_the_error() -> None:
    d, error = exact_difference(torch.tensor([1e30]), torch.tensor([1e-30]))
    assert float(error) != 0
    assert math.fsum([float(d), float(error)]) == math.fsum(
        [float(torch.tensor(1e30)), -float(torch.tensor(1e-30))]
    )


def test_what_is_not_finite_stays_so() -> None:
    d, error = exact_difference(torch.tensor([math.inf, math.nan]), torch.tensor([1.0, 1.0]))
    assert d[0] == math.inf
    assert d[1].isnan()
    assert (error == 0).all()
