"""Which rows of experts can be compared, and what a flip is."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rlk_align.compare.routing import Flips, _preference
from rlk_align.judge.contract import Contract
from rlk_align.judge.load import open_contract
from rlk_align.model.families import read_shape
from rlk_align.report.routing_words import layer_words
from rlk_align.results import LayerRouting

SPARSE = Path(__file__).parents[2] / "fixtures/sparse"
BF16: Contract = open_contract("bf16")


def preference(logits: torch.Tensor, mine: torch.Tensor, other: torch.Tensor) -> np.ndarray:
    return _preference(logits, logits.double(), mine, other, read_shape(SPARSE))


def flips() -> Flips:
    """Of six rows, 1 shares an expert, 3 shares none, and of 4 the ids were not kept."""
    flipped = np.array([False, True, False, True, True, False])
    number = np.array([1, 3])
    a, b = torch.tensor([[0, 5], [1, 2]]), torch.tensor([[5, 7], [0, 4]])
    return Flips(flipped, number, a, b)


def test_rows_that_share_an_expert_can_be_compared() -> None:
    every = np.arange(6)
    assert flips().comparable(every).tolist() == [True, True, True, False, False, True]


def test_shared_experts_are_brought_into_the_same_slots() -> None:
    a = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).repeat(2, 1)
    b = torch.tensor([[3.0, 4.0, 9.0, 9.0]]).repeat(2, 1)
    # Row 1: the first side's second slot is the second side's first. Row 2 is not flipped.
    x, y = flips().aligned(np.array([1, 2]), a, b)
    assert x.tolist() == [[0.0, 0.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]]
    assert y.tolist() == [[0.0, 0.0, 3.0, 4.0], [3.0, 4.0, 9.0, 9.0]]
    # What was given stays.
    assert a[0, 0] == 1


def test_a_shared_expert_that_differs_still_does() -> None:
    a = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    b = torch.tensor([[3.0, float("nan"), 9.0, 9.0]])
    x, y = flips().aligned(np.array([1]), a, b)
    assert not torch.equal(x, y)
    assert y[0, 3].isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gap_is_counted_in_roundings_of_a_difference(dtype: torch.dtype) -> None:
    ulp = torch.finfo(dtype).eps
    logits = torch.tensor([[0.5, 1.0 + 2 * ulp, 1.0, 1.0]], dtype=dtype)
    mine, other = torch.tensor([[1, 2]]), torch.tensor([[2, 3]])
    (gap,) = preference(logits, mine, other)
    assert gap == pytest.approx(2 / (2 / 12) ** 0.5)
    (broken,) = preference(logits * float("nan"), mine, other)
    assert broken == float("inf")
    (tie,) = preference(logits, torch.tensor([[1, 2]]), torch.tensor([[1, 3]]))
    assert tie == 0


def layer(**values: float) -> str:
    counts = {"rows": 9, "flipped": 3, "at_router": 2, "measured": 2, "ties": 0, "largest_gap": 0.0}
    record = LayerRouting.model_validate(
        {"site": "layers.1.experts", "layer": 1, "first_at_router": None} | counts | values
    )
    return layer_words(record, BF16)


def test_what_is_said_of_a_flip() -> None:
    assert "2 at the router, on equal inputs (2 ties of logits)" in layer(ties=2)
    assert "(2 with a gap of up to 1.5 roundings, which is rounding)" in layer(largest_gap=1.5)
    beyond = layer(ties=1, largest_gap=40.0)
    assert "1 tie of logits, 1 with a gap of up to 40 roundings: beyond rounding" in beyond
    assert "2 whose gap is not known" in layer(measured=0)
    effects = layer(at_router=0, measured=0)
    assert effects == "3 of 9 rows flipped; 3 follow from inputs that differ already"
