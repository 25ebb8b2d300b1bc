"""Rows that an engine took from its prefix cache, by its own count of tokens, are not missing: they
are counted apart, later rows read them, and every other absent row is still reported."""

from pathlib import Path
from typing import Any

import numpy as np
from synthetic import (
    CONTRACT,
    NAMES,
    Values,
    all_cells,
    changed,
    compared,
    corrupt,
    draw,
    write_trace,
)

from rlk_align.judge.verdict import Verdict, judge_by
from rlk_align.model.prompts import Sample, TokenBatch
from rlk_align.model.sites import RowIndex
from rlk_align.report.verdict import verdict_document
from rlk_align.report.verdict_json import verdict_json
from rlk_align.trace.numbered import number_rows, read_rows, with_cached
from rlk_align.trace.reader import SiteRows

BATCH = TokenBatch(
    (
        Sample("a", (1, 2, 3, 4), (5, 6, 7)),
        Sample("b", (1, 2, 3, 9), (8, 7, 6)),
        Sample("c", (1, 2, 4), (3, 2, 1)),
    )
)
INDEX = RowIndex(BATCH)
CELLS = all_cells(BATCH)
CACHED = {1: 3, 2: 2}
"""By the engine's count: the first three tokens of b, and two of c; a computed them."""
SERVED = [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]
HIDDEN = [name for name in NAMES if name not in ("logits", "logprob")]


def values() -> Values:
    """Rows with the same tokens so far have the same values in hidden states."""
    drawn = draw(batch=BATCH)
    for name in HIDDEN:
        for i, p in SERVED:
            drawn[name][CELLS.index((i, p))] = drawn[name][CELLS.index((0, p))]
    return drawn


def judged(folder: Path, train: Values | None = None, **options: Any) -> Verdict:
    """The rollout's prefill has the options of `write_pass`."""
    options = {"without": dict.fromkeys(HIDDEN, SERVED), "cached": CACHED} | options
    rollout = write_trace(folder / "rollout", values(), batch=BATCH, **options)
    trained = write_trace(folder / "train", train or values(), batch=BATCH)
    return judge_by(compared(rollout, trained), CONTRACT)


def edge_rows(verdict: Verdict) -> tuple[int, int, int]:
    (edge,) = verdict.comparison.edges
    return edge.paired_rows, edge.expected_rows, edge.cached_rows


def test_cached_rows_are_counted_apart(tmp_path: Path) -> None:
    verdict = judged(tmp_path)
    assert verdict.doubts == []
    assert verdict.status == "pass"
    served = len(SERVED) * len(HIDDEN)
    computed = (len(CELLS) - len(SERVED)) * len(HIDDEN) + 2 * 9
    assert edge_rows(verdict) == (computed, computed, served)
    coverage = verdict_json(verdict)["coverage"]
    assert (coverage["fraction"], coverage["served_from_cache"]) == (1.0, served)
    assert coverage["unpaired"] == []
    facts = {f.label: f.text for f in verdict_document(verdict, tmp_path).facts}
    assert facts["coverage"].endswith(f"; {served} more served from the cache, not compared")


def test_a_row_beyond_the_engines_count_is_missing(tmp_path: Path) -> None:
    lost = {**dict.fromkeys(HIDDEN, SERVED), "layers.1.up_proj": [*SERVED, (1, 3)]}
    verdict = judged(tmp_path, without=lost)
    assert verdict.status == "inconclusive"
    lacks = "prefill_vs_train: layers.1.up_proj: rollout prefill lacks 1 rows"
    assert lacks in verdict.doubts


def test_without_a_count_every_absent_row_is_missing(tmp_path: Path) -> None:
    verdict = judged(tmp_path, cached={})
    assert verdict.status == "inconclusive"
    reasons = {f"prefill_vs_train: {name}: rollout prefill lacks 5 rows" for name in HIDDEN}
    assert reasons <= set(verdict.doubts)


def test_a_smaller_count_leaves_rows_missing(tmp_path: Path) -> None:
    verdict = judged(tmp_path, cached={1: 3, 2: 1})
    assert "prefill_vs_train: embed: rollout prefill lacks 1 rows" in verdict.doubts


def test_logits_of_a_prompts_last_token_are_never_cached(tmp_path: Path) -> None:
    lost = {**dict.fromkeys(HIDDEN, SERVED), "logprob": [(1, 3)]}
    verdict = judged(tmp_path, without=lost, cached={1: 7, 2: 2})
    assert "prefill_vs_train: logprob: rollout prefill lacks 1 rows" in verdict.doubts


def test_a_cached_row_that_the_pass_has_is_compared(tmp_path: Path) -> None:
    verdict = judged(tmp_path, without={})
    assert edge_rows(verdict)[2] == 0
    assert verdict.status == "pass"


def first_divergence(folder: Path, train: Values) -> tuple[str, int, int] | None:
    """Of a rollout with a fault of attention behind the cached prefix of b."""
    rollout = write_trace(
        folder / "rollout",
        corrupt(values(), "layers.0.attn", [(1, 3)], BATCH),
        batch=BATCH,
        without=dict.fromkeys(HIDDEN, SERVED),
        cached=CACHED,
    )
    (edge,) = compared(rollout, write_trace(folder / "train", train, batch=BATCH)).edges
    first = edge.first_bitwise
    return first and (first.site, first.sample, first.position)


def test_a_fault_behind_a_cached_prefix_is_introduced_there(tmp_path: Path) -> None:
    """The keys and values of the prefix are those of the sample that computed them."""
    assert first_divergence(tmp_path, values()) == ("layers.0.attn", 1, 3)


def test_nothing_is_proven_behind_a_prefix_that_the_other_side_has_with_other_bits(
    tmp_path: Path,
) -> None:
    train, row = values(), CELLS.index((1, 1))
    train["layers.0.k_rope"][row] = changed(train["layers.0.k_rope"][row])
    assert first_divergence(tmp_path, train) is None


def test_cached_rows_have_the_bits_of_the_sample_that_computed_them(tmp_path: Path) -> None:
    trace = write_trace(
        tmp_path / "trace",
        values(),
        batch=BATCH,
        without=dict.fromkeys(HIDDEN, SERVED),
        cached=CACHED,
    )
    rows = read_rows(trace.read_pass("prefill"), "layers.0.k_rope", INDEX)
    assert rows is not None
    assert rows.number.tolist() == list(range(len(CELLS)))
    assert [CELLS[n] for n in rows.cached] == SERVED
    for cell in SERVED:
        here, source = (rows.at[CELLS.index(c)] for c in (cell, (0, cell[1])))
        assert here == source
    assert (rows.rows.sample[rows.at] == np.array([i for i, _ in CELLS])).sum() == (
        len(CELLS) - len(SERVED)
    )


def test_it_is_unknown_which_of_two_different_rows_was_cached(tmp_path: Path) -> None:
    """b computes its prefix too, with other bits than a: c may have the row of either."""
    drawn = values()
    drawn["embed"][CELLS.index((1, 1))] += 1
    trace = write_trace(
        tmp_path / "trace", drawn, batch=BATCH, without={"embed": [(2, 0), (2, 1)]}, cached={2: 2}
    )
    rows = read_rows(trace.read_pass("prefill"), "embed", INDEX)
    assert rows is not None
    assert [CELLS[n] for n in rows.cached] == [(2, 0), (2, 1)]
    assert CELLS.index((2, 0)) in rows.number
    assert CELLS.index((2, 1)) not in rows.number


def test_rows_have_one_number_for_each_beginning() -> None:
    number = dict(zip(CELLS, INDEX.prefixes.tolist(), strict=True))
    assert [number[1, p] == number[0, p] for p in range(7)] == [True] * 3 + [False] * 4
    assert [number[2, p] == number[0, p] for p in range(6)] == [True] * 2 + [False] * 4
    # Token 3 at position 2 of a, and after another beginning in c.
    assert number[2, 3] != number[0, 2]


def test_a_log_prob_is_that_of_another_sample_only_if_it_speaks_of_the_same_token() -> None:
    """Sample d ends, and samples another token, where those of e and f go on in their prompts."""
    batch = TokenBatch(
        (Sample("d", (1, 2), (9, 9)), Sample("e", (1, 2, 3), (9,)), Sample("f", (1, 2, 9), (4,)))
    )
    index = RowIndex(batch)
    rows = SiteRows(
        sample=np.array([0, 0]),
        position=np.array([1, 2]),
        digest=np.arange(4).reshape(2, 2),
        **dict.fromkeys(("absmax", "norm", "nonfinite", "shard", "index"), np.zeros(2)),
    )
    numbered = number_rows(rows, index)
    taken = {1: 2, 2: 2}
    here = {name: index.rows(np.array([i]), np.array([1]))[0] for name, i in (("e", 1), ("f", 2))}
    for ahead, known in ((False, ["e", "f"]), (True, ["f"])):
        found = with_cached(numbered, taken, index, ahead)
        assert [name for name, row in here.items() if row in found.number] == known
        assert set(here.values()) <= set(found.cached)
