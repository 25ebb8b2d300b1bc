"""Explanations of log-probs: each wrong transformation is named, and ambiguity is reported."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from synthetic import BATCH, draw, keep_logprobs, write_trace

from rlk_align.model.sites import RowIndex
from rlk_align.probe.explain_logprobs import Explanation, explain, explain_pass
from rlk_align.probe.transformations import Stated, TokenContext
from rlk_align.trace.reader import Trace

N, V = 64, 97


def _case(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, TokenContext]:
    """Logits as peaked as a trained model's; row p scores the id of row p + 1."""
    generator = torch.Generator().manual_seed(0)
    logits = 3.0 * torch.randn(N, V, generator=generator)
    ids = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
    before = torch.cat([torch.tensor([1]), ids[:-1]])
    after = torch.cat([ids[1:], torch.tensor([-1])])
    return logits.to(dtype), TokenContext(targets=ids, before=before, after=after)


def _scored(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probs in float32, as engines compute them."""
    return logits.float().log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1)


def _nucleus(logits: torch.Tensor, p: float) -> torch.Tensor:
    ordered, order = logits.sort(-1, descending=True)
    mass = ordered.softmax(-1)
    drop = torch.zeros_like(logits, dtype=torch.bool)
    drop = drop.scatter(-1, order, mass.cumsum(-1) - mass >= p)
    return logits.masked_fill(drop, -torch.inf)


def _likeliest(logits: torch.Tensor, k: int) -> torch.Tensor:
    least = logits.topk(k, -1).values[:, -1:]
    return logits.masked_fill(logits < least, -torch.inf)


LOGITS, ROWS = _case()
KEPT = TokenContext(LOGITS.argmax(-1), ROWS.before, ROWS.after)
"""Targets that no truncation removes."""
T07 = Stated(temperature=0.7)
CASES = {
    # Name: (stated transformation, rows, reported log-probs).
    "as stated": (Stated(), ROWS, _scored(LOGITS, ROWS.targets)),
    "raw": (T07, ROWS, _scored(LOGITS, ROWS.targets)),
    "temperature twice": (T07, ROWS, _scored(LOGITS / 0.7 / 0.7, ROWS.targets)),
    "another temperature": (Stated(), ROWS, _scored(LOGITS / 1.01, ROWS.targets)),
    "no temperature": (
        Stated(temperature=0.7, top_p=0.9),
        KEPT,
        _scored(_nucleus(LOGITS, 0.9), KEPT.targets),
    ),
    "no truncation": (
        Stated(temperature=0.7, top_p=0.9),
        KEPT,
        _scored(LOGITS / 0.7, KEPT.targets),
    ),
    "top-p 0.9": (Stated(), KEPT, _scored(_nucleus(LOGITS, 0.9), KEPT.targets)),
    "top-k 20": (T07, KEPT, _scored(_likeliest(LOGITS / 0.7, 20), KEPT.targets)),
    "bf16 logits": (Stated(), ROWS, _scored(LOGITS.bfloat16(), ROWS.targets)),
    "bf16 log-softmax": (
        Stated(),
        ROWS,
        LOGITS.bfloat16().log_softmax(-1).gather(-1, ROWS.targets[:, None])[:, 0],
    ),
    "previous label": (Stated(), ROWS, _scored(LOGITS, ROWS.before)),
    "next label": (Stated(), ROWS, _scored(LOGITS, ROWS.after.clamp_min(0))),
    "log2": (Stated(), ROWS, _scored(LOGITS, ROWS.targets) / math.log(2)),
    "log10": (Stated(), ROWS, _scored(LOGITS, ROWS.targets) / math.log(10)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_transformation_is_named(name: str) -> None:
    stated, rows, reported = CASES[name]
    explanation = explain(LOGITS, reported, rows, stated)
    assert explanation.name == name, explanation
    assert explanation.also == ()
    unlabelled = 1 if name == "next label" else 0
    assert explanation.explained == N - unlabelled
    assert sum(explanation.exceptions.values()) == unlabelled
    assert explanation.largest_residual <= (0.1 if "softmax" in name else 1e-4)
    assert f"{explanation.explained} of {N} rows" in explanation.words


def test_a_stated_temperature_is_no_finding() -> None:
    explanation = explain(LOGITS, _scored(LOGITS / 0.7, ROWS.targets), ROWS, T07)
    assert (explanation.name, explanation.explained) == ("as stated", N)


@pytest.mark.parametrize("largest", [2.0, 30.0, 400.0])
def test_rounding_is_no_finding(largest: float) -> None:
    """Two float32 computations of a log-prob, for logits of any size."""
    logits = LOGITS * (largest / float(LOGITS.abs().max()))
    reported = (logits - logits.logsumexp(-1, keepdim=True)).gather(-1, ROWS.targets[:, None])
    assert explain(logits, reported[:, 0], ROWS, Stated()).name == "as stated"


def test_missing_ones_are_exceptions() -> None:
    reported = _scored(LOGITS, ROWS.targets)
    reported[[3, 40]] = 0.0
    explanation = explain(LOGITS, reported, ROWS, Stated())
    assert (explanation.name, explanation.explained) == ("as stated", N - 2)
    assert explanation.exceptions == {"zero": 2}
    assert "2 report 0" in explanation.words


def test_another_token_at_edges_is_an_exception() -> None:
    reported, edge = _scored(LOGITS, ROWS.targets), torch.arange(N) % 16 == 15
    others = LOGITS.log_softmax(-1).scatter(-1, ROWS.targets[:, None], -torch.inf).amax(-1)
    explanation = explain(LOGITS, torch.where(edge, others, reported), ROWS, Stated())
    assert (explanation.name, explanation.explained) == ("as stated", N - 4)
    assert explanation.exceptions == {"another token": 4}


def test_what_cannot_be_told_apart_is_said() -> None:
    """Ten tokens have the whole mass, so more of them change nothing."""
    logits = torch.full((N, V), -60.0)
    logits[:, :10] = LOGITS[:, :10]
    rows = TokenContext(logits.argmax(-1), ROWS.before, ROWS.after)
    reported = _scored(_likeliest(logits, 5), rows.targets)
    exact = explain(logits, reported, rows, Stated())
    assert (exact.name, exact.also) == ("top-k 5", ())
    stated = Stated(top_k=5)
    reported = _scored(logits, rows.targets)
    told = explain(logits, reported, rows, stated)
    assert told.name == "raw"
    assert {"top-k 10", "top-k 20", "top-k 50"} <= set(told.also)
    assert "as well" in told.words


def test_what_fits_nothing_is_said() -> None:
    reported = _scored(LOGITS, ROWS.targets) + 0.01 * torch.arange(N)
    explanation = explain(LOGITS, reported, ROWS, Stated())
    assert explanation.name is None
    assert "no known transformation" in explanation.words
    assert math.isnan(explanation.largest_residual)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_row_that_is_not_finite_fits_nothing(value: float) -> None:
    reported = _scored(LOGITS, ROWS.targets)
    reported[5] = value
    assert explain(LOGITS, reported, ROWS, Stated()).name is None


def test_no_row_is_no_explanation() -> None:
    none = TokenContext(*(torch.zeros(0, dtype=torch.long) for _ in range(3)))
    explanation: Explanation = explain(LOGITS[:0], torch.zeros(0), none, Stated())
    assert (explanation.name, explanation.rows, explanation.words) == (None, 0, "there are no rows")


def test_a_large_vocabulary_goes_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlk_align.probe.explain_logprobs.BLOCK_ELEMENTS", 5 * V)
    stated, rows, reported = CASES["temperature twice"]
    explanation = explain(LOGITS, reported, rows, stated)
    assert (explanation.name, explanation.explained) == ("temperature twice", N)


def _recorded(folder: Path, **options: Any) -> Trace:
    """A trace whose log-probs follow from its logits; `options` are those of `write_trace`."""
    values = draw()
    targets = torch.from_numpy(np.roll(RowIndex(BATCH).token, -1))
    values["logprob"] = _scored(values["logits"], targets)[:, None]
    return write_trace(folder / "trace", values, controls=(), **options)


@pytest.mark.parametrize("passname", ["decode", "prefill"])
def test_a_pass_is_explained_row_by_row(tmp_path: Path, passname: str) -> None:
    explanation = explain_pass(_recorded(tmp_path, passes=(passname,)), passname)
    tokens = BATCH.sampled_tokens
    assert explanation.name == "as stated"
    assert (explanation.rows, explanation.explained) == (tokens, tokens)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"without": {"logits": None}}, "prefill has no logits"),
        ({"without": {"logprob": None}}, "prefill has no log-probs"),
        ({"keep": keep_logprobs}, "no row of prefill keeps both"),
    ],
)
def test_a_pass_without_both_says_what_it_lacks(
    tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    explanation = explain_pass(_recorded(tmp_path, **options), "prefill")
    assert (explanation.name, explanation.rows) == (None, 0)
    assert says in explanation.words


def test_a_block_is_sorted_once_for_all_truncations(monkeypatch: pytest.MonkeyPatch) -> None:
    sorts: list[int] = []
    sort = torch.Tensor.sort

    def counted(x: torch.Tensor, *args: Any, **more: Any) -> Any:
        sorts.append(x.numel())
        return sort(x, *args, **more)

    reported = _scored(_nucleus(LOGITS, 0.9), ROWS.targets)
    monkeypatch.setattr(torch.Tensor, "sort", counted)
    explain(LOGITS, reported, ROWS, Stated())
    assert sorts == [LOGITS.numel()]


def test_a_temperature_is_fitted_to_few_rows_of_a_large_vocabulary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rlk_align.probe import transformations

    seen: list[int] = []
    softmax = torch.Tensor.log_softmax

    def counted(x: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        seen.append(len(x))
        return softmax(x, *args, **more)

    reported = _scored(LOGITS / 1.02, ROWS.targets)
    monkeypatch.setattr(transformations, "FITTED_ELEMENTS", 1)
    monkeypatch.setattr(torch.Tensor, "log_softmax", counted)
    assert explain(LOGITS, reported, ROWS, Stated()).name == "another temperature"
    assert seen.count(16) > 100
    assert seen.count(len(LOGITS)) < 50
