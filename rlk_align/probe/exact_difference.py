"""Differences in float64 that lose nothing."""

import torch


def exact_difference(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x - y in float64, and the rounding error of that: d + error = x - y exactly.

    Knuth's TwoSum of x and -y. The error is 0 wherever the exponents lie within 53 bits less the
    significand's of each other: always, but for values of very different magnitude.
    """
    a, b = x.double(), -y.double()
    d = a + b
    back = d - a
    error = (a - (d - back)) + (b - back)
    # A difference that is not finite has no error to speak of.
    return d, error.where(torch.isfinite(d), 0.0)


def split_difference(
    a_on_a: torch.Tensor, b_on_a: torch.Tensor, b_on_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(introduced, inherited, errors `[2, ...]`): the four add up to a_on_a - b_on_b exactly."""
    introduced, first = exact_difference(a_on_a, b_on_a)
    inherited, second = exact_difference(b_on_a, b_on_b)
    return introduced, inherited, torch.stack([first, second])
