"""Padded rows as one row without padding: the bits of the log-probs, and the shapes."""

from typing import Any

import pytest
import torch
from hf_models import small_model
from rlk_kernels.integrations import hf
from rlk_kernels.integrations.hf.packing import PackedRow, packed
from rlk_kernels.integrations.hf.score import score_without_padding

VOCABULARY = 100
LAST = 9


def padded(*lengths: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask) of prompts, padded on the left, and completions, padded on the right."""
    prompt, completion = (max(part) for part in zip(*lengths, strict=True))
    shape = len(lengths), prompt + completion
    ids = torch.randint(2, VOCABULARY, shape, generator=torch.Generator().manual_seed(0))
    at = torch.arange(shape[1])
    mask = torch.stack([(at >= prompt - p) & (at < prompt + c) for p, c in lengths]).long()
    return ids, mask


BATCHES = {
    "padding on both sides": padded((5, 9), (8, 4), (3, 7)),
    "no padding": padded((4, 9), (4, 9)),
    "an answer of no tokens": padded((5, 9), (8, 0)),
    "a row of no tokens": padded((5, 9), (0, 0)),
    "no tokens": (padded((3, 9), (3, 9))[0], torch.zeros(2, 12, dtype=torch.long)),
}


@pytest.fixture(scope="module")
def model() -> Any:
    model = small_model("Qwen3", vocab_size=VOCABULARY, num_hidden_layers=2, head_dim=32)
    hf.use_kernels(model)
    return model


def without_padding(model: Any, ids: Any, mask: Any, temperature: float = 1.0) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return score_without_padding(model, model, ids, mask, LAST, temperature, True)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_bits_are_those_of_padded_rows(model: Any, batch: str, temperature: float) -> None:
    ids, mask = BATCHES[batch]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = hf.score_tokens(
            model, ids, mask, last=LAST, temperature=temperature, return_entropy=True
        )
    actual = without_padding(model, ids, mask, temperature)
    real = (mask[:, 1:] & mask[:, :-1]).bool()[:, -LAST:]
    assert actual.shape == (len(ids), LAST, 2)
    assert actual[..., 0].equal(expected[0])
    assert actual[..., 1][real].equal(expected[1][real])
    assert bool((actual[~real] == 0).all())


def test_gradients_repeat_and_are_those_of_padded_rows(model: Any) -> None:
    ids, mask = BATCHES["padding on both sides"]
    up = torch.randn(len(ids), LAST, generator=torch.Generator().manual_seed(1))

    def gradients(scores: torch.Tensor) -> dict[str, torch.Tensor]:
        model.zero_grad()
        (scores * up).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    first = gradients(without_padding(model, ids, mask)[..., 0])
    again = gradients(without_padding(model, ids, mask)[..., 0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows = gradients(hf.score_tokens(model, ids, mask, last=LAST))
    for name, gradient in first.items():
        assert gradient.equal(again[name])
        # The sums over rows have another order.
        assert (gradient - rows[name]).norm() <= 0.02 * rows[name].norm()
        assert gradient.norm() > 0


def test_entropies_without_a_gradient_have_the_same_values(model: Any) -> None:
    ids, mask = BATCHES["padding on both sides"]
    found = []
    for gradient in (True, False):
        model.zero_grad()
        scores = score_without_padding(model, model, ids, mask, LAST, 0.7, True, gradient)
        scores[..., 0].sum().backward()
        found.append((scores, [p.grad.clone() for p in model.parameters()]))
    (with_it, some), (without, others) = found
    assert with_it.equal(without)
    assert all(a.equal(b) for a, b in zip(some, others, strict=True))
    model.zero_grad()
    score_without_padding(model, model, ids, mask, LAST, 0.7, True, False)[..., 1].sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_other_lengths_have_the_same_shapes() -> None:
    def shapes(row: PackedRow) -> list[torch.Size]:
        return [x.shape for x in (row.ids, row.positions, row.starts, row.rows, row.targets)]

    some = packed(*padded((5, 9), (8, 4), (3, 7)), LAST)
    others = packed(*padded((6, 8), (8, 5), (3, 8)), 8)
    assert shapes(some) == shapes(others)
    assert some.ids.shape[1] % 8 == some.rows.shape[0] % 8 == 0
    assert len(some.rows.unique()) == len(some.rows)
    assert len(some.places) == 20
