"""By how much a choice goes against its scores, against every choice that there is."""

import dataclasses
from itertools import combinations
from pathlib import Path

import pytest
import torch

from rlk_align.compare.expert_choice import beyond_choice
from rlk_align.model.shape import ModelShape, read_shape

SPARSE = read_shape(Path(__file__).parents[2] / "fixtures/sparse")
GROUPED = dataclasses.replace(SPARSE, experts=12, top_k=4, groups=4, top_groups=2)


def chosen_by(scores: torch.Tensor, shape: ModelShape) -> list[int]:
    """The choice of one row, by the definition."""
    groups = scores.reshape(shape.groups, -1)
    sums = groups.topk(2, dim=1).values.sum(dim=1)
    best = sums.topk(shape.top_groups).indices.tolist()
    size = groups.shape[1]
    inside = [e for e in range(len(scores)) if e // size in best]
    return sorted(sorted(inside, key=lambda e: -float(scores[e]))[: shape.top_k])


def test_what_exceeds_a_choice() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]]).repeat(4, 1).double()
    chosen = torch.tensor([[0, 1], [0, 3], [1, 1], [0, 4]])
    beyond = beyond_choice(logits, chosen, SPARSE)
    assert beyond.shape == (4, 1)
    # An id that is there twice, or none of an expert, is beyond everything.
    assert beyond.flatten().tolist() == [0.0, 2.0, float("inf"), float("inf")]


@pytest.mark.parametrize("seed", range(3))
def test_of_all_choices_from_groups_one_alone_is_right(seed: int) -> None:
    scores = torch.rand(12, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    every = torch.tensor(list(combinations(range(12), 4)))
    beyond = beyond_choice(scores.expand(len(every), -1), every, GROUPED)[:, 0]
    (right,) = every[beyond == 0].tolist()
    assert right == chosen_by(scores, GROUPED)
    groups = torch.tensor([len(set(row)) for row in (every // 3).tolist()])
    assert beyond[groups > 2].isinf().all()
    assert beyond[groups <= 2].isfinite().all()


def test_a_choice_among_tied_groups_is_right_whichever_is_taken() -> None:
    scores = torch.tensor([[9.0, 1.0, 0.0, 5.0, 3.0, 0.0, 7.0, 1.0, 0.0, 1.0, 0.0, 0.0]]).double()
    # Groups 1 and 2 add up to 8 each, behind group 0.
    for chosen in ([0, 1, 3, 4], [0, 1, 6, 7]):
        assert beyond_choice(scores, torch.tensor([chosen]), GROUPED).item() == 0
    # Group 3 adds up to 1.
    assert beyond_choice(scores, torch.tensor([[0, 1, 2, 9]]), GROUPED).item() == 7
    # Within groups 0 and 2, 7 exceeds 0.
    assert beyond_choice(scores, torch.tensor([[0, 1, 2, 7]]), GROUPED).item() == 7
