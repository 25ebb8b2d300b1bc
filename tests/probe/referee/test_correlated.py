"""Features that round to the same number have one common error."""

import pytest
import torch

from rlk_align.probe.referee.correlated import CorrelatedErrors
from rlk_align.probe.referee.rounding import rounding_variance


def factor(exact: torch.Tensor, dtype: str, gain: float = 0.0) -> float:
    rounded = exact.to(getattr(torch, dtype)).double()
    errors = CorrelatedErrors()
    errors.add(rounded - exact + gain * exact, exact, rounded, rounding_variance(exact, dtype))
    return errors.factor


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("features", [8, 64, 512, 20_000])
def test_independent_features_are_not_alike(features: int, dtype: str) -> None:
    torch.manual_seed(features)
    exact = 3 * torch.randn(32, features).double()
    assert 1.0 <= factor(exact, dtype) < 1.3
    # A fault of whole rows is no correlation.
    assert factor(exact, dtype, gain=0.01) < 1.3


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_equal_features_are_off_together(share: float) -> None:
    """Like the logits of tokens that were never trained."""
    torch.manual_seed(1)
    exact = 3 * torch.randn(32, 512).double()
    equal = int(share * 512)
    exact[:, :equal] = exact[:, :1]
    found = factor(exact, "bfloat16")
    # The variance of a sum of n equal errors is n times that of independent errors.
    assert 0.2 * share * equal < found < 3 * equal


def test_a_row_that_equal_features_make_up_is_known_too() -> None:
    """A gain of the row explains the error completely, so no correlation remains."""
    torch.manual_seed(2)
    exact = torch.randn(32, 64).double()
    exact[:, :32] = 1000 * exact[:, :1]
    assert factor(exact, "bfloat16") > 10


def test_what_is_not_finite_is_left_out() -> None:
    exact = torch.randn(4, 16).double()
    exact[1, 3] = float("nan")
    assert factor(exact, "bfloat16") < 3
    assert CorrelatedErrors().factor == 1.0
