"""Rows of two passes are paired by place; whatever is left over is reported."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from synthetic import BATCH, SITES, all_cells

from rlk_align.compare.pairing import pair_site
from rlk_align.model.sites import RowIndex
from rlk_align.trace.numbered import NumberedRows, number_rows
from rlk_align.trace.reader import SiteRows

INDEX = RowIndex(BATCH)
CELLS = all_cells()
EMBED = SITES[0]
LOGITS = next(s for s in SITES if s.op == "logits")
NAMES = ("rollout prefill", "train prefill")
NOTHING = (None, None)


def rows(cells: list[tuple[int, int]], digests: list[int] | None = None) -> SiteRows:
    """Rows in that order; a row's digest is its number in the batch unless told."""
    n = len(cells)
    if digests is None:
        digests = [CELLS.index(c) if c in CELLS else -1 for c in cells]
    sample, position = (np.array([c[k] for c in cells], dtype=np.int64) for k in (0, 1))
    digest = np.stack([np.array(digests, dtype=np.int64), np.zeros(n, dtype=np.int64)], axis=1)
    zeros = np.zeros(n, dtype=np.int64)
    return SiteRows(
        sample,
        position,
        digest,
        zeros.astype(float),
        zeros.astype(float),
        zeros,
        zeros,
        np.arange(n),
    )


def numbered(cells: list[tuple[int, int]], digests: list[int] | None = None) -> NumberedRows:
    return number_rows(rows(cells, digests), INDEX)


@given(st.permutations(CELLS), st.integers(0, len(CELLS)))
def test_rows_are_numbered_in_the_order_of_the_batch(
    cells: list[tuple[int, int]], count: int
) -> None:
    rows = numbered(cells[:count])
    assert rows.number.tolist() == sorted(CELLS.index(c) for c in cells[:count])
    assert rows.rows.digest[rows.at, 0].tolist() == rows.number.tolist()
    assert (rows.conflicts, rows.strays) == (0, 0)


def test_a_row_seen_twice_with_the_same_bits_is_one_row() -> None:
    rows = numbered([(0, 0), (1, 2), (0, 0), (0, 0)])
    assert rows.number.tolist() == [0, CELLS.index((1, 2))]
    assert rows.at.tolist() == [0, 1]
    assert rows.conflicts == 0


def test_a_row_seen_twice_with_other_bits_is_a_conflict() -> None:
    rows = numbered([(0, 0), (0, 1), (0, 0), (0, 0), (0, 1)], [5, 6, 5, 7, 6])
    assert rows.conflicts == 1
    # The first is kept: it is the one that the engine went on from.
    assert rows.rows.digest[rows.at, 0].tolist() == [5, 6]


def test_either_half_of_a_digest_makes_a_conflict() -> None:
    twice = rows([(0, 0), (0, 0)], [5, 5])
    twice.digest[1, 1] = 9
    assert number_rows(twice, INDEX).conflicts == 1


def test_rows_that_the_batch_does_not_have_are_strays() -> None:
    length = len(BATCH.samples[0].ids)
    rows = numbered([(0, length), (0, 0), (3, 0), (-1, 0), (0, -1)])
    assert rows.strays == 4
    assert rows.number.tolist() == [0]


def everything() -> np.ndarray:
    return INDEX.expected(EMBED, decode=False)


def test_complete_sides_leave_nothing_over() -> None:
    a, b = numbered(CELLS), numbered(CELLS[::-1])
    paired, unpaired = pair_site(EMBED, a, b, everything(), NAMES, NOTHING)
    assert unpaired == []
    assert paired.number.tolist() == list(range(len(CELLS)))
    assert paired.equal.all()
    assert paired.a.sample[paired.a_at].tolist() == [s for s, _ in CELLS]
    assert paired.b.position[paired.b_at].tolist() == [p for _, p in CELLS]


def test_other_bits_are_not_equal() -> None:
    digests = list(range(len(CELLS)))
    digests[3] = 99
    paired, _ = pair_site(
        EMBED, numbered(CELLS), numbered(CELLS, digests), everything(), NAMES, NOTHING
    )
    assert np.flatnonzero(~paired.equal).tolist() == [3]
    other = rows(CELLS)
    other.digest[5, 1] = 1
    paired, _ = pair_site(
        EMBED, numbered(CELLS), number_rows(other, INDEX), everything(), NAMES, NOTHING
    )
    assert np.flatnonzero(~paired.equal).tolist() == [5]


def test_missing_rows_are_counted_by_side() -> None:
    a, b = numbered(CELLS[1:]), numbered(CELLS[:-2])
    paired, unpaired = pair_site(EMBED, a, b, everything(), NAMES, NOTHING)
    assert paired.number.tolist() == list(range(1, len(CELLS) - 2))
    assert [(u.site, u.rows, u.explained) for u in unpaired] == [
        ("embed", 1, False),
        ("embed", 2, False),
    ]
    assert "rollout prefill" in unpaired[0].reason
    assert "train prefill" in unpaired[1].reason


def test_a_site_that_one_side_lacks_is_not_paired() -> None:
    paired, unpaired = pair_site(EMBED, numbered(CELLS), None, everything(), NAMES, NOTHING)
    assert paired is None
    assert [(u.rows, u.explained) for u in unpaired] == [(len(CELLS), False)]
    assert "train prefill lacks every row" in unpaired[0].reason


def test_a_site_that_nobody_has_is_reported_for_both() -> None:
    paired, unpaired = pair_site(EMBED, None, None, everything(), NAMES, NOTHING)
    assert paired is None
    assert [u.rows for u in unpaired] == [len(CELLS)] * 2
    assert not any(u.explained for u in unpaired)


def test_an_engine_explains_what_it_cannot_show() -> None:
    reasons = (None, "fused into the kernel")
    paired, unpaired = pair_site(EMBED, numbered(CELLS), None, everything(), NAMES, reasons)
    assert paired is None
    [only] = unpaired
    assert only.explained
    assert only.rows == len(CELLS)
    assert "fused into the kernel" in only.reason
    assert "train prefill" in only.reason


def test_what_an_engine_showed_in_a_part_of_a_pass_alone_is_not_paired() -> None:
    reasons = (None, "rows in an order that is not known")
    sides = numbered(CELLS), numbered(CELLS[:3])
    paired, [only] = pair_site(EMBED, *sides, everything(), NAMES, reasons)
    assert paired is None
    assert (only.rows, only.explained) == (len(CELLS), True)


def test_an_explanation_of_one_side_does_not_excuse_the_other() -> None:
    reasons = (None, "fused into the kernel")
    _, unpaired = pair_site(EMBED, None, None, everything(), NAMES, reasons)
    assert any(not u.explained and "rollout prefill" in u.reason for u in unpaired)


def test_conflicts_are_reported_and_never_explained() -> None:
    digests = [*range(len(CELLS)), 77]
    a = numbered([*CELLS, (0, 0)], digests)
    for sides in ((a, numbered(CELLS)), (numbered(CELLS), a)):
        paired, unpaired = pair_site(EMBED, *sides, everything(), NAMES, NOTHING)
        assert len(paired.number) == len(CELLS)
        [only] = unpaired
        assert (only.rows, only.explained) == (1, False)
        assert "twice" in only.reason


def test_strays_are_reported() -> None:
    a = numbered([*CELLS, (9, 9), (9, 8)])
    for sides in ((a, numbered(CELLS)), (numbered(CELLS), a)):
        paired, unpaired = pair_site(EMBED, *sides, everything(), NAMES, NOTHING)
        assert len(paired.number) == len(CELLS)
        [only] = unpaired
        assert (only.rows, only.explained) == (2, False)


def test_rows_beyond_the_expected_ones_are_left_out() -> None:
    # An engine may show the logits of prompt positions too; nothing is judged there.
    mask = INDEX.expected(LOGITS, decode=False)
    paired, unpaired = pair_site(LOGITS, numbered(CELLS), numbered(CELLS), mask, NAMES, NOTHING)
    assert paired.number.tolist() == np.flatnonzero(mask).tolist()
    assert unpaired == []


def test_no_row_in_common_is_a_pair_of_nothing() -> None:
    a, b = numbered(CELLS[:4]), numbered(CELLS[4:])
    paired, unpaired = pair_site(EMBED, a, b, everything(), NAMES, NOTHING)
    assert paired is not None
    assert len(paired.number) == 0
    assert sum(u.rows for u in unpaired) == len(CELLS)


def test_nonfinite_entries_of_both_sides_are_added() -> None:
    a, b = rows(CELLS), rows(CELLS)
    a.nonfinite[2], b.nonfinite[2], b.nonfinite[4] = 3, 4, 5
    sides = number_rows(a, INDEX), number_rows(b, INDEX)
    paired, _ = pair_site(EMBED, *sides, everything(), NAMES, NOTHING)
    assert {n: v for n, v in enumerate(paired.nonfinite.tolist()) if v} == {2: 7, 4: 5}
