"""Distributions over the whole vocabulary, against their formulas; and faults that the log-probs of
sampled tokens cannot show."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from comparisons import comparison
from comparisons import edge as made_edge
from synthetic import (
    BATCH,
    SITES,
    Values,
    all_cells,
    compared,
    draw,
    keep_logprobs,
    wanted_cells,
    write_trace,
)
from torch import Tensor

from rlk_align.compare import distribution
from rlk_align.compare.distribution import Distributions
from rlk_align.judge.load import open_contract
from rlk_align.judge.verdict import judge
from rlk_align.model.sites import RowIndex
from rlk_align.results import Distribution, EdgeResult

INDEX = RowIndex(BATCH)
LOGITS = next(s for s in SITES if s.name == "logits")
ROWS = [all_cells().index(cell) for cell in wanted_cells(LOGITS, False)]
RARE = 10
"""The first of the tokens that are never sampled, and that have hardly any probability."""


def of(first: Tensor, second: Tensor, temperatures: tuple[float, float] = (1.0, 1.0)):
    sums = Distributions(temperatures)
    for i in range(0, len(first), 3):
        sums.add(np.arange(len(first))[i : i + 3], first[i : i + 3], second[i : i + 3])
    return sums.result(INDEX, len(first), first.shape[1])


def test_figures_are_those_of_the_formulas() -> None:
    generator = torch.Generator().manual_seed(3)
    first = 3 * torch.randn(8, 63, generator=generator)
    second = first + 0.3 * torch.randn(8, 63, generator=generator)
    found = of(first, second, (1.0, 0.5))
    log_p, log_q = first.double().log_softmax(1), (second.double() / 0.5).log_softmax(1)
    p, q, delta = log_p.exp(), log_q.exp(), log_q - log_p
    near = {"rel": 1e-9}
    kl, reverse = (p * -delta).sum(1), (q * delta).sum(1)
    assert found.kl == pytest.approx(kl.mean().item(), **near)
    assert found.kl_max == pytest.approx(kl.max().item(), **near)
    assert found.kl_error == pytest.approx(kl.std(correction=0).item() / 8**0.5, **near)
    assert found.reverse_kl == pytest.approx(reverse.mean().item(), **near)
    assert found.reverse_kl_max == pytest.approx(reverse.max().item(), **near)
    variation = (p - q).abs().sum(1) / 2
    assert found.total_variation == pytest.approx(variation.mean().item(), **near)
    assert found.total_variation_max == pytest.approx(variation.max().item(), **near)
    assert found.max_abs_dlogp == pytest.approx(delta.abs().max().item(), **near)
    row, token = divmod(int(delta.abs().argmax()), 63)
    assert found.largest == (*INDEX.locate(row), token)
    assert found.top1_agreement == (p.argmax(1) == q.argmax(1)).double().mean().item()
    tops = zip(p.topk(20).indices.tolist(), q.topk(20).indices.tolist(), strict=True)
    common = [len(set(x) & set(y)) / 20 for x, y in tops]
    assert found.top20_agreement == pytest.approx(np.mean(common), **near)
    by_token = delta.abs().mean(0)
    assert found.worst_token == pytest.approx(by_token.max().item(), **near)
    assert found.worst_token_id == int(by_token.argmax())
    assert found.typical_token == pytest.approx(by_token.median().item(), **near)


def test_small_and_extreme_differences_are_exact() -> None:
    # The formula of a KL cancels at such a Δ: it is ½ Σ p (Δ − mean Δ)² there.
    first = torch.zeros(1, 4, dtype=torch.float64)
    second = torch.tensor([[1e-9, 0, 0, 0]], dtype=torch.float64)
    assert of(first, second).kl == pytest.approx(0.5 * 1e-18 * (1 / 4 - 1 / 16), rel=1e-6)
    far = of(torch.tensor([[0.0, 900.0]]), torch.tensor([[900.0, 0.0]]))
    assert (far.kl, far.reverse_kl, far.total_variation) == (900, 900, 1)
    assert far.top1_agreement == 0


def test_ties_agree_and_a_nan_does_not_vanish() -> None:
    tied = of(torch.tensor([[2.0, 2, 0]]), torch.tensor([[1.0, 2, 0]]))
    assert tied.top1_agreement == 1
    broken = of(torch.tensor([[1.0, 2, 0]] * 2), torch.tensor([[1.0, math.nan, 0], [1, 2, 0]]))
    for name in ("kl", "reverse_kl", "total_variation", "max_abs_dlogp", "worst_token"):
        assert math.isnan(getattr(broken, name)), name
    assert broken.top1_agreement == 0.5


def with_logits(logits: Tensor) -> Values:
    """The values of a trace with these logits, and with the log-probs that follow from them."""
    logp = logits.float().log_softmax(1)
    ids = [BATCH.samples[i].ids[p + 1] for i, p in wanted_cells(LOGITS, False)]
    values = draw()
    values["logprob"][ROWS] = logp[ROWS].gather(1, torch.tensor(ids)[:, None])
    return values | {"logits": logits}


def healthy(seed: int) -> Tensor:
    """bfloat16 logits, those of a seed with noise of a rounding or two."""
    logits = 2 * draw()["logits"].float()
    logits[:, RARE:] -= 14
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed))
    return (logits + 2**-8 * logits.abs() * noise).bfloat16()


def measured(folder: Path, first: Values, second: Values) -> EdgeResult:
    traces = [write_trace(folder / name, v) for name, v in (("a", first), ("b", second))]
    [edge] = compared(*traces).edges
    return edge


def found_in(edge: EdgeResult) -> Distribution:
    assert edge.distribution is not None
    return edge.distribution


def test_an_edge_has_the_figures_of_its_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = healthy(1), healthy(2)
    second[ROWS[4]] = first[ROWS[4]]
    whole = found_in(measured(tmp_path / "whole", with_logits(first), with_logits(second)))
    assert (whole.positions, whole.missing, whole.vocabulary) == (len(ROWS), 0, 16)
    truth = of(first[ROWS], second[ROWS])
    for name in ("kl", "reverse_kl", "total_variation", "max_abs_dlogp", "top20_agreement"):
        assert getattr(whole, name) == pytest.approx(getattr(truth, name), rel=1e-12), name
    monkeypatch.setattr(distribution, "_ELEMENTS", 16)
    rows = found_in(measured(tmp_path / "rows", with_logits(first), with_logits(second)))
    for name, value in whole.model_dump().items():
        assert rows.model_dump()[name] == pytest.approx(value, rel=1e-12), name


def test_equal_sides_and_sides_without_values(tmp_path: Path) -> None:
    values = with_logits(healthy(1))
    equal = found_in(measured(tmp_path / "equal", values, values))
    assert (equal.positions, equal.kl, equal.max_abs_dlogp, equal.worst_token) == (
        len(ROWS),
        0,
        0,
        0,
    )
    assert (equal.top1_agreement, equal.top20_agreement, equal.largest) == (1, 1, None)
    a, b = (
        write_trace(tmp_path / name, with_logits(healthy(seed)), keep=keep_logprobs)
        for seed, name in enumerate("ab")
    )
    nothing = found_in(compared(a, b).edges[0])
    assert (nothing.positions, nothing.missing) == (0, len(ROWS))
    assert math.isnan(nothing.kl)


def wrong_row(logits: Tensor) -> tuple[Tensor, int]:
    """A row of the LM head is that of another token, which is as improbable."""
    logits[:, 12] = logits[:, 15]
    return logits, 12


def shard_off_by_one(logits: Tensor) -> tuple[Tensor, int]:
    """The second half of the vocabulary begins with the last token of the first half."""
    logits[:, 12] = logits[:, 11]
    return logits, 12


def stale_row(logits: Tensor) -> tuple[Tensor, int]:
    """A row of the LM head was not delivered."""
    logits[:, 13] += 1.5
    return logits, 13


@pytest.mark.parametrize("plant", [wrong_row, shard_off_by_one, stale_row])
def test_a_fault_of_tokens_that_are_never_sampled_is_named(tmp_path: Path, plant) -> None:
    contract = open_contract("bf16")
    first, second = healthy(1), healthy(2)
    sound = measured(tmp_path / "sound", with_logits(first), with_logits(second))
    faulty, token = plant(second.clone())
    edge = measured(tmp_path / "faulty", with_logits(first), with_logits(faulty))
    # The log-probs of sampled tokens are as far apart as without the fault.
    assert edge.metrics.max_abs_dlogp < 1.01 * sound.metrics.max_abs_dlogp
    assert found_in(edge).worst_token_id == token
    assert found_in(edge).largest is not None
    assert found_in(edge).largest[2] == token
    for measured_edge, breached in ((sound, []), (edge, ["token_excess"])):
        shown = made_edge(metrics=measured_edge.metrics, distribution=measured_edge.distribution)
        few = contract.model_copy(update={"min_tokens": len(ROWS)})
        breaches = judge(comparison(shown), few).breaches
        assert [b.metric for b in breaches] == breached
