"""Where the tokens of a request part from the recorded ones, and why, by the kernels' own draws."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlk_align.engines.patch import redraw
from rlk_align.errors import ModelError
from rlk_align.logs.replay.record import Replay
from rlk_align.logs.replay.redraw import ROWS, replay
from rlk_align.logs.replay.request import RecordedRequest
from rlk_align.report.replayed import replayed_document, replayed_record
from rlk_align.results import EngineRecord

TOKENS, VOCABULARY = ROWS + 8, 60
"""More than one block of rows."""
LIMITS = {"top_p": 0.9}
ENGINE = EngineRecord(
    name="hf", version="1", options={}, dtype="float32", model="m", environment={}
)


def logits() -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return list(torch.randn(TOKENS, VOCABULARY, generator=made) * 2)


def recorded(processed: bool = True, temperature: float = 0.7) -> RecordedRequest:
    """Two prompt tokens and what the sampler draws after them, by two seeds."""
    at = np.arange(2, 2 + TOKENS)
    seeds = np.where(at < 20, 7, -1)
    where = (torch.from_numpy(x) for x in (seeds, at))
    rows = torch.stack(logits())
    draw = redraw(rows, torch.zeros(TOKENS).long(), *where, temperature, LIMITS)
    where = (torch.from_numpy(x) for x in (seeds, at))
    said = redraw(rows, draw.ids, *where, temperature, LIMITS)
    return RecordedRequest(
        name="a", ids=(5, 6, *draw.ids.tolist()), at=at, seeds=seeds, processed=processed,
        logprobs=(said.processed if processed else said.raw).double().numpy(),
        temperature=temperature, limits=LIMITS,
    )  # fmt: skip


def again(request: RecordedRequest, rows: Any = None, before: Any = None) -> Replay:
    return replay(request, rows or logits(), before or [None] * TOKENS, ENGINE, redraw)


@pytest.mark.parametrize(("processed", "temperature"), [(True, 0.7), (False, 0.7), (True, 0.0)])
def test_the_same_logits_draw_the_same_tokens(processed: bool, temperature: float) -> None:
    found = again(recorded(processed, temperature))
    assert (found.status, found.exit_code, found.parting) == ("pass", 0, None)
    assert found.tokens == found.compared_logprobs == TOKENS
    assert found.otherwise == found.other_logprobs == found.missing == 0
    assert found.seeds == (7, -1)
    assert replayed_document(found, "run").headline == f"all {TOKENS} tokens are drawn again"


def test_another_seed_is_another_draw() -> None:
    request = recorded()
    found = again(replace(request, seeds=request.seeds + 1), before=logits())
    assert found.parting is not None
    assert found.parting.reason == "another draw"
    assert found.parting.same_logits
    assert found.exit_code == 1
    assert found.otherwise > 1
    assert found.other_logprobs == 0
    row = logits()[found.parting.number].double()
    gap = row[found.parting.drawn] - row[found.parting.recorded]
    assert found.parting.gap == pytest.approx(float(gap))
    # Without recorded logits the log-prob tells it.
    unseen = again(replace(request, seeds=request.seeds + 1))
    assert unseen.parting is not None
    assert unseen.parting.reason == "another draw"
    silent = replace(request, seeds=request.seeds + 1, logprobs=np.full(TOKENS, np.nan))
    unknown = again(silent)
    assert unknown.parting is not None
    assert unknown.parting.reason == "unknown"
    assert unknown.compared_logprobs == 0


def test_a_position_that_is_off_by_one_is_another_draw() -> None:
    request = recorded()
    later = replace(request, ids=(4, *request.ids), at=request.at + 1)
    found = again(later).parting
    assert found is not None
    assert found.reason == "another draw"


def test_narrower_limits_are_another_kept_set() -> None:
    request = replace(recorded(), limits={"top_p": 0.3})
    for before in (None, logits()):
        found = again(request, before=before)
        dropped = [p for p in [found.parting] if p and not p.recorded_is_kept]
        assert [p.reason for p in dropped] == ["another kept set"]
    assert found.parting is not None
    assert found.parting.logprob == -np.inf
    record = replayed_record(found, "run")
    assert record["parting"]["logprob"] is None
    assert record["schema"] == "rlk-align/replay/1"


def test_another_logit_is_named_with_its_distance() -> None:
    request, rows = recorded(), logits()
    other = rows[30].clone()
    token = request.ids[int(request.at[30])]
    other[(token + 1) % VOCABULARY] += 9.0
    changed = [*rows[:30], other, *rows[31:]]
    found = again(request, changed, before=rows)
    parting = found.parting
    assert parting is not None
    assert (parting.number, parting.position) == (30, 32)
    assert parting.reason == "another logit"
    assert parting.drawn == (token + 1) % VOCABULARY
    assert parting.logits is not None
    assert parting.logits.differing == 1
    assert parting.logits.largest == pytest.approx(9.0, abs=1e-5)
    assert found.otherwise == found.other_logprobs == 1
    assert found.first_other_logprob == 32
    text = " ".join(fact.text for fact in replayed_document(found, "run").facts)
    assert f"1 of {VOCABULARY} logits differ from the recorded ones, by up to 9" in text


def test_a_logit_that_moves_no_token_is_seen_in_its_log_prob() -> None:
    request, rows = recorded(), logits()
    rows[3] = rows[3] + 1e-4 * torch.arange(VOCABULARY)
    found = again(request, rows)
    assert found.status == "pass"
    assert (found.other_logprobs, found.first_other_logprob) == (1, 5)
    assert "1 of 72 have other bits, the first at position 5" in str(replayed_document(found, ""))


def test_rows_that_are_not_there_pass_nothing() -> None:
    rows: list[torch.Tensor | None] = [*logits()]
    rows[4] = None
    found = again(recorded(), rows)
    assert (found.status, found.exit_code, found.missing) == ("inconclusive", 4, 1)
    assert "71 of 72 tokens are drawn again" in replayed_document(found, "").headline
    empty = again(recorded(), [None] * TOKENS)
    assert (empty.status, empty.tokens) == ("inconclusive", 0)


def test_a_row_without_a_distribution_is_an_error() -> None:
    rows = logits()
    rows[2] = rows[2] * torch.nan
    with pytest.raises(ModelError, match="row 2 of the logits has no distribution"):
        again(recorded(), rows)
