"""The (sample, position) of each row, compared with a loop over the cells."""

from itertools import product
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlk_align.engines.common.rows import (
    ForwardRows,
    TokenGrid,
    packed_grid,
    packed_rows,
    padded_grid,
)
from rlk_align.model.prompts import Sample

ids = st.lists(st.integers(1, 99), min_size=1, max_size=7).map(tuple)
samples = st.lists(
    st.builds(Sample, st.just("p"), ids, st.one_of(st.just(()), ids)), min_size=1, max_size=5
).map(lambda found: [(3 * i + 2, s) for i, s in enumerate(found)])
orders = st.sampled_from(["batch first", "sequence first"])


def check(grid: TokenGrid, numbered: list, order: str, at: dict) -> None:
    """`at`: (sample, position) -> the expected (row, column)."""
    known = dict(numbered)
    count, length = grid.ids.shape
    rows = grid.rows(order)
    assert rows.cells == count * length
    assert len(rows.index) == len(at) == grid.real.sum()
    cells = list(zip(rows.index, rows.sample, rows.position, rows.sampled, strict=True))
    for index, sample, position, sampled in cells:
        row, column = at[sample, position]
        assert index == (row * length + column if order == "batch first" else column * count + row)
        s = known[sample]
        assert grid.ids[row, column] == s.ids[position]
        assert grid.positions[row, column] == position
        wanted = len(s.prompt_ids) <= position + 1 < len(s.ids)
        assert sampled == wanted
        assert grid.targets[row, column] == (s.ids[position + 1] if wanted else -1)
    assert len({(s, p) for _, s, p, _ in cells}) == len(at)
    for row, column in product(range(count), range(length)):
        if (row, column) not in at.values():
            values = (grid.ids, grid.positions, grid.owner, grid.targets)
            assert [v[row, column] for v in values] == [0, 0, -1, -1]
    assert grid.starts == tuple(at[number, 0] for number, _ in numbered)


@given(samples, st.sampled_from(["left", "right"]), st.integers(1, 4), orders)
def test_padded(numbered: list, side: str, multiple: int, order: str) -> None:
    grid = padded_grid(numbered, side, multiple)
    longest = max(len(s.ids) for _, s in numbered)
    length = grid.ids.shape[1]
    assert length % multiple == 0
    assert longest <= length < longest + multiple
    at = {}
    for row, (number, s) in enumerate(numbered):
        first = 0 if side == "right" else length - len(s.ids)
        at |= {(number, p): (row, first + p) for p in range(len(s.ids))}
    check(grid, numbered, order, at)


@given(samples, st.integers(1, 4), orders)
def test_packed(numbered: list, multiple: int, order: str) -> None:
    grid = packed_grid(numbered, multiple)
    total = sum(len(s.ids) for _, s in numbered)
    count, length = grid.ids.shape
    assert count == 1
    assert length % multiple == 0
    assert total <= length < total + multiple
    order_of = [(number, p) for number, s in numbered for p in range(len(s.ids))]
    check(grid, numbered, order, {cell: (0, i) for i, cell in enumerate(order_of)})


@given(samples, st.integers(1, 3), st.integers(1, 4), st.integers(0, 40))
def test_packed_sequences_that_ranks_share_are_filled(
    numbered: list, each: int, multiple: int, least: int
) -> None:
    grid = packed_grid(numbered, each * multiple, each, least)
    starts = [column for _, column in grid.starts]
    assert all(start % each == 0 for start in starts)
    assert grid.ids.shape[1] >= least
    assert grid.ids.shape[1] % (each * multiple) == 0
    at = {
        (number, p): (0, start + p)
        for (number, s), start in zip(numbered, starts, strict=True)
        for p in range(len(s.ids))
    }
    check(grid, numbered, "batch first", at)


@given(samples, st.integers(1, 4))
def test_ranks_are_dealt_sequences(numbered: list, ranks: int) -> None:
    whole = padded_grid(numbered, "left")
    dealt = [whole.deal(rank, ranks) for rank in range(ranks)]
    assert len({grid.ids.shape for grid in dealt}) == 1
    assert sum(int(grid.real.sum()) for grid in dealt) == whole.real.sum()
    for rank, grid in enumerate(dealt):
        own, length = numbered[rank::ranks], whole.ids.shape[1]
        at = {
            (number, p): (row, length - len(s.ids) + p)
            for row, (number, s) in enumerate(own)
            for p in range(len(s.ids))
        }
        check(grid, own, "batch first", at)


@given(samples, st.randoms())
def test_some_columns_are_those_of_the_whole(numbered: list, random: Any) -> None:
    whole = padded_grid(numbered, "right")
    length = whole.ids.shape[1]
    columns = np.array(random.sample(range(length), random.randint(0, length)), dtype=np.int64)
    some = whole.select(columns)
    for name in ("ids", "positions", "owner", "targets"):
        assert np.array_equal(getattr(some, name), getattr(whole, name)[:, columns])
    begins = {(r, columns[c]) for r, c in some.starts}
    assert begins == {(r, c) for r, c in whole.starts if c in columns}


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(1, 5)), min_size=1),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=4, max_size=4),
)
def test_rows_that_an_engine_packed(requests: list, wanted: list) -> None:
    """Requests of (sample, first position, rows)."""
    sampled = [range(min(w), max(w)) for w in wanted]
    owners = np.array([r[0] for r in requests])
    starts = np.cumsum([0, *(r[2] for r in requests)])
    position = np.concatenate([np.arange(first, first + n) for _, first, n in requests])
    rows = packed_rows(owners, starts, position, sampled)
    expected = [
        (o, p, p in sampled[o]) for o, first, n in requests for p in range(first, first + n)
    ]
    assert list(zip(rows.sample, rows.position, rows.sampled, strict=True)) == expected
    assert rows.index.tolist() == list(range(rows.cells))


@given(
    st.integers(0, 9), st.integers(0, 9), st.integers(1, 9), st.integers(0, 9), st.integers(0, 9)
)
def test_a_stretch_of_one_sequence(sample: int, first: int, n: int, one: int, other: int) -> None:
    sampled = range(min(one, other), max(one, other))
    rows = ForwardRows.of_sequence(sample, range(first, first + n), sampled)
    expected = [(i, sample, p, p in sampled) for i, p in enumerate(range(first, first + n))]
    found = zip(rows.index, rows.sample, rows.position, rows.sampled, strict=True)
    assert list(found) == expected
    assert rows.cells == n
