"""Which rows of experts can be compared, and what a flip is."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rlk_align.compare.expert_choice import Routers
from rlk_align.compare.routing import Flips, _preference
from rlk_align.judge.contract import Contract
from rlk_align.judge.load import open_contract
from rlk_align.model.shape import read_shape
from rlk_align.model.sites import model_sites
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


def test_the_gap_of_corrected_scores() -> None:
    """Of logits that are fp32 sums: a last bit of one is within rounding, and a thousandth not."""
    shape = dataclasses.replace(read_shape(SPARSE), model_type="glm4_moe")
    mine, other = torch.tensor([[1, 2]]), torch.tensor([[2, 3]])
    for apart, within in ((2**-23, True), (1e-3, False)):
        logits = torch.tensor([[-2.0, 0.5 + apart, 1.0, 0.5]])
        scores = logits.double().sigmoid()
        (gap,) = _preference(logits, scores, mine, other, shape)
        assert (0 < gap <= 5) == within
        assert gap > 0
    tied = torch.tensor([[0.1, 0.7, 0.9, 0.7]]).double()
    assert _preference(tied.float(), tied, mine, other, shape) == 0


def test_the_gap_between_groups_is_that_of_what_decided() -> None:
    shape = dataclasses.replace(
        read_shape(SPARSE), model_type="glm4_moe", experts=4, groups=2, top_groups=1
    )
    # The first group by 0.1, though expert 2 has the best score of all.
    scores = torch.tensor([[0.7, 0.6, 0.8, 0.4]]).double()
    mine, other = torch.tensor([[0, 1]]), torch.tensor([[2, 3]])
    logits = scores.float()
    (gap,), (back,) = (
        _preference(logits, scores, *sets, shape) for sets in ((mine, other), (other, mine))
    )
    assert gap == -back > 1000


def test_scores_need_the_checkpoint_only_where_they_are_corrected(tmp_path: Path) -> None:
    shape = read_shape(SPARSE)
    corrected = dataclasses.replace(shape, model_type="glm4_moe", shared_intermediate=8)
    logits = torch.tensor([[0.5, -0.5]])
    name = "layers.1.experts"
    sites = [{s.name: s for s in model_sites(x)}[name] for x in (shape, corrected)]
    plain = Routers(tmp_path, shape).scores(sites[0], logits)
    assert plain is not None
    assert torch.equal(plain, logits.double())
    assert Routers(tmp_path, corrected).scores(sites[1], logits) is None
    tensor = {"model.layers.1.mlp.gate.e_score_correction_bias": torch.tensor([0.25, 1.0])}
    save_file(tensor, tmp_path / "model.safetensors")
    found = Routers(tmp_path, corrected).scores(sites[1], logits)
    assert found is not None
    torch.testing.assert_close(found, logits.double().sigmoid() + torch.tensor([0.25, 1.0]))


def test_the_corrected_scores_of_a_softmax(tmp_path: Path) -> None:
    shape = dataclasses.replace(read_shape(SPARSE), model_type="ernie4_5_moe", experts=2)
    choice = {s.name: s for s in model_sites(shape)}["layers.1.experts"]
    tensor = {"model.layers.1.mlp.moe_statics.e_score_correction_bias": torch.tensor([[0.1, 0.9]])}
    save_file(tensor, tmp_path / "model.safetensors")
    logits = torch.tensor([[0.5, -0.5]])
    found = Routers(tmp_path, shape).scores(choice, logits)
    assert found is not None
    torch.testing.assert_close(found, logits.double().softmax(dim=1) + torch.tensor([[0.1, 0.9]]))
    assert shape.correction(1) == (1, 2)


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
