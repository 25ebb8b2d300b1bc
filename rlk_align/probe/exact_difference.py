"""Differences in float64 together with their rounding errors, so that nothing is lost."""

import torch


def exact_difference(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns d = x - y in float64 and its rounding error: d + error = x - y exactly.

    This is Knuth's TwoSum of x and -y. The error is 0 except for values of very different
    magnitude: float64 has 53 bits for both significands.
    """
    a, b = x.double(), -y.double()
    d = a + b
    back = d - a
    error = (a - (d - back)) + (b - back)
    # A difference that is not finite has no rounding error.
    return d, error.where(torch.isfinite(d), 0.0)


def split_difference(
    a_on_a: torch.Tensor, b_on_a: torch.Tensor, b_on_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (introduced, inherited, errors `[2, ...]`), four terms that add up to a_on_a - b_on_b
    exactly."""
    introduced, first = exact_difference(a_on_a, b_on_a)
    inherited, second = exact_difference(b_on_a, b_on_b)
    return introduced, inherited, torch.stack([first, second])
