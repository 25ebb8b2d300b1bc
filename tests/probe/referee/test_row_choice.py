"""The rows that are recomputed: reproducible, bounded, and with those that a comparison names."""

import numpy as np
import pytest
from comparisons import comparison, edge, site
from synthetic import BATCH

from rlk_align.model.prompts import Sample, TokenBatch
from rlk_align.model.sites import RowIndex
from rlk_align.probe.referee import row_choice
from rlk_align.probe.referee.row_choice import ROWS, choose_rows


def index(*lengths: int, prompt: int = 1) -> RowIndex:
    ids = [tuple(range(n)) for n in lengths]
    return RowIndex(
        TokenBatch(tuple(Sample(str(n), i[:prompt], i[prompt:]) for n, i in enumerate(ids)))
    )


def chosen(
    of: RowIndex,
    *worst: int,
    first: tuple[int, int] | None = None,
    kept: np.ndarray | None = None,
) -> np.ndarray:
    kept = np.ones(len(of), dtype=bool) if kept is None else kept
    shown = comparison(edge(sites=[site(introduced=1, differ=1, first_introduced=first)]))
    rows = choose_rows(shown if first else comparison(), list(worst), kept, of)
    last = of.offsets[1:] - 1
    assert not np.isin(last, rows).any()
    assert (np.diff(rows) > 0).all()
    assert rows.dtype == np.int64
    assert ((rows >= 0) & (rows < len(of))).all()
    return rows


def test_a_small_batch_is_chosen_whole_but_for_last_rows() -> None:
    of = RowIndex(BATCH)
    assert chosen(of).tolist() == sorted(set(range(len(of))) - set(of.offsets[1:] - 1))


def test_nothing_is_left_of_one_token() -> None:
    assert chosen(index(1)).tolist() == []
    assert chosen(index(1), 0, first=(0, 0)).tolist() == []
    assert chosen(index(1, 2)).tolist() == [1]


def test_the_same_rows_each_time_and_no_more_than_are_drawn() -> None:
    of = index(*[60] * 100, prompt=20)
    rows = chosen(of)
    assert rows.tolist() == chosen(of).tolist()
    assert ROWS * 0.9 < len(rows) <= ROWS + row_choice.SAMPLED_ROWS
    assert len(set(of.position[rows])) == 59, "every position, but the last"
    assert len(np.unique(rows // 60)) == 100, "every sample"


@pytest.mark.parametrize("prompt", [1, 59, 60])
def test_rows_at_which_a_token_was_sampled_are_among_them(prompt: int) -> None:
    of = index(*[60] * 100, prompt=prompt)
    rows = chosen(of)
    sampled = of.position[rows] >= prompt - 1
    assert sampled.sum() >= min(row_choice.SAMPLED_ROWS * 0.8, (60 - prompt) * 100)


def test_what_a_comparison_points_at_is_among_them() -> None:
    of = index(*[200] * 300)
    for sample in (0, 150, 299):
        found = set(chosen(of, int(of.offsets[sample]) + 198, first=(sample, 77)).tolist())
        start = int(of.offsets[sample])
        assert set(range(start, start + 199)) <= found
        assert start + 77 in set(chosen(of, first=(sample, 77)).tolist())


@pytest.mark.parametrize("row", [0, 5, ROWS - 1, ROWS, 7000, 40_000 - 2])
def test_of_a_long_sample_the_rows_up_to_the_worst(row: int) -> None:
    of = index(10, 40_000, 10)
    rows = chosen(of, 10 + row)
    assert 10 + row in rows
    about = rows[(rows >= 10 + max(0, row + 1 - ROWS)) & (rows <= 10 + row)]
    assert len(about) == min(ROWS, row + 1)
    assert len(rows) <= 2 * ROWS + row_choice.SAMPLED_ROWS


def test_long_samples_bound_what_attention_reads() -> None:
    lengths = [3000] * 20
    rows = chosen(index(*lengths))
    assert len(np.unique(rows // 3000)) == row_choice.KEYS // 3000
    assert len(chosen(index(*[row_choice.KEYS + 5] * 3))) <= ROWS + row_choice.SAMPLED_ROWS


def test_rows_are_drawn_of_those_that_were_kept() -> None:
    of = index(*[60] * 400, prompt=20)
    kept = np.zeros(len(of), dtype=bool)
    kept[::40] = True
    rows = chosen(of, kept=kept)
    assert set(rows) == set(np.flatnonzero(kept)) - set(of.offsets[1:] - 1)
    pointed = set(chosen(of, 130, first=(3, 7), kept=kept)) - set(rows)
    assert pointed == {187, *range(120, 179)} - set(rows)
    assert chosen(of, kept=np.zeros(len(of), dtype=bool)).tolist() == []
