"""Where pieces of the logits lie: never where something is yet to be read, nor beyond a memory."""

import functools
import gc
import sys
import weakref
from dataclasses import replace

import pytest
import rlk_kernels as rk
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_logp_suite import case, gradients, run_ours, upstreams
from rlk_kernels import accumulate_triton, linear_grpo_triton, linear_logp_triton, tiles
from rlk_kernels.linear_logp_triton import STORE_TILE as LARGE
from rlk_kernels.room import UNIT, block_elements, one_after_another, together
from rlk_kernels.tiles import SAFE, Tile

accumulate = sys.modules["rlk_kernels.accumulate"]
T, H, V = 320, 128, 1100
SMALL = 550 << 10
"""Bytes of a chunk for which the first has room in the gradient and in its lower halves."""
SIZES = {
    "t": st.integers(1, 20000), "v": st.integers(1, 200000), "k": st.integers(0, 5000),
    "own": st.integers(-1000, 1 << 28),
}  # fmt: skip


def trouble(pieces, t, v, k, own, at_once):
    """What is wrong with them, by name."""
    found = set()
    edges = [piece.first for piece in pieces] + [v]
    if edges != [0] + [piece.last for piece in pieces] or sorted(set(edges)) != edges:
        found.add("not every column once, front to back")
    for i, piece in enumerate(pieces):
        end = piece.at + t * piece.wide
        if piece.wide % UNIT or piece.wide < piece.last - piece.first:
            found.add("width")
        if piece.memory == 0 and end > max(own, t * UNIT):
            found.add("beyond the block")
        if piece.memory and (piece.at < piece.last * k or end > v * k):
            found.add("rows that are written while it is read, or beyond the last")
        for other in pieces[i + 1 :] if at_once else []:
            shared = min(end, other.at + t * other.wide) > max(piece.at, other.at)
            if piece.memory == other.memory and shared:
                found.add("two in one place")
    return found


@settings(max_examples=300, deadline=None)
@given(**SIZES, spare=st.booleans(), widest=st.integers(1, 200000))
def test_pieces_one_after_another_lie_where_nothing_else_is(t, v, k, own, spare, widest):
    pieces = one_after_another(t, v, k, own, spare, widest, 132)
    assert not trouble(pieces, t, v, k, own, False)
    assert spare or not any(piece.memory for piece in pieces)
    assert all(piece.wide <= max(widest, UNIT) for piece in pieces)
    assert block_elements(pieces, t) <= max(own, t * UNIT, 0)


@settings(max_examples=300, deadline=None)
@given(**SIZES, spares=st.integers(1, 2))
def test_pieces_at_the_same_time_lie_where_nothing_else_is(t, v, k, own, spares):
    pieces = together(t, v, k, own, spares, 132)
    if pieces is None:
        assert t * v > own - t * UNIT  # no room in the block alone
    else:
        assert not trouble(pieces, t, v, k, own, True)
        assert {piece.memory for piece in pieces} <= set(range(spares + 1))


def test_the_memory_of_a_gradient_is_used():
    """A whole chunk of 4096 tokens at H=4096 beside a block of 448 MiB, where it takes 1187."""
    own = 448 << 19
    pieces = together(4096, 151936, 4096, own, 1, 132)
    assert pieces
    assert sum(x.wide for x in pieces if x.memory) > 80000
    pieces = one_after_another(16384, 151936, 4096, 160 << 19, True, 151936, 132)
    assert len(pieces) < 16
    assert sum(x.wide for x in pieces if x.memory) > 100000
    assert len(one_after_another(16384, 151936, 4096, 160 << 19, False, 151936, 132)) >= 30


@pytest.mark.parametrize("moved", [{"at": -1}, {"memory": 1}, {"first": 1}, {"wide": UNIT}])
def test_a_piece_in_the_wrong_place_is_noticed(moved):
    pieces = together(4096, 151936, 4096, 448 << 19, 1, 132)
    assert not trouble(pieces, 4096, 151936, 4096, 448 << 19, True)
    (name, by), last = *moved.items(), pieces[-1 if "memory" in moved else -2]
    wrong = replace(last, **{name: getattr(last, name) + by})
    assert trouble(
        [wrong if piece is last else piece for piece in pieces], 4096, 151936, 4096, 448 << 19, True
    )


@pytest.fixture
def large_tiles(monkeypatch):
    """No bit's, but the interpreter's time."""
    monkeypatch.setattr(linear_logp_triton, "INTERPRETED_TILE", Tile(128, 256, 128, 4, 1))
    for module in (accumulate_triton, tiles):
        monkeypatch.setattr(module, "INTERPRETED", Tile(128, 256, 256, 4, 1))


def grpo_gradients(c):
    leaves = [x.detach().clone().requires_grad_() for x in (c.hidden, c.weight, c.bias)]
    loss, _ = rk.linear_grpo_loss(
        leaves[0][None], leaves[1], c.target[None], None, torch.ones(1), torch.ones(1, T),
        bias=leaves[2], backend="triton",
    )  # fmt: skip
    return torch.autograd.grad(T * loss, leaves)[:2]


def logp_gradients(c):
    return gradients(c, run_ours(c, "triton"), upstreams(c))


@functools.cache
def in_one_piece(dtype, made):
    """(case, its gradients), once for all tests."""
    c = case(T, H, V, dtype, "cpu", bias=True)
    return c, made(c)


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize(
    ("dtype", "chunk", "chunks", "memories"),
    [
        (torch.float16, SMALL, 2, {0, 1, 2}),
        (torch.float16, 900 << 10, 1, {0, 1}),
        (torch.float32, 1200 << 10, 2, {0, 1}),
        (torch.float32, 1600 << 10, 1, {0, 1}),
    ],
)
def test_pieces_change_no_bit_of_the_grpo_gradients(dtype, chunk, chunks, memories, monkeypatch):
    c, whole = in_one_piece(dtype, grpo_gradients)
    monkeypatch.setattr(linear_grpo_triton, "CHUNK", chunk)
    plan = linear_grpo_triton.chunks_of(T, V, H, c.hidden.element_size(), True, 132)
    assert len(plan) == chunks
    assert {piece.memory for _, pieces in plan for piece in pieces} == memories
    assert all(torch.equal(a, b) for a, b in zip(whole, grpo_gradients(c), strict=True))


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("alone", [0, 1])
def test_a_gradient_made_without_the_other_has_the_same_bits(alone, monkeypatch):
    c, whole = in_one_piece(torch.float16, grpo_gradients)
    monkeypatch.setattr(linear_grpo_triton, "CHUNK", SMALL)
    leaves = [c.hidden, c.weight]
    leaves[alone] = leaves[alone].detach().clone().requires_grad_()
    loss, _ = rk.linear_grpo_loss(
        leaves[0][None], leaves[1], c.target[None], None, torch.ones(1), torch.ones(1, T),
        bias=c.bias, backend="triton",
    )  # fmt: skip
    assert torch.equal(torch.autograd.grad(T * loss, leaves[alone])[0], whole[alone])


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize(
    ("dtype", "passes"), [(torch.float16, 1), (torch.float16, 2), (torch.float32, 1)]
)
def test_pieces_change_no_bit_of_the_gradients(dtype, passes, monkeypatch):
    c, whole = in_one_piece(dtype, logp_gradients)
    rows = T if passes == 1 else 128
    free = UNIT * rows
    pieces = one_after_another(rows, V, H, free, True, V if passes == 1 else rows, 132)
    assert {piece.memory for piece in pieces} == {0, 1}
    halves = rows * H if dtype == torch.float16 else 0
    monkeypatch.setattr(linear_logp_triton, "HELD", (free + halves) * c.hidden.element_size())
    monkeypatch.setattr(linear_logp_triton, "SLAB_NUMBERS", rows * H)
    parts = logp_gradients(c)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


@pytest.mark.usefixtures("large_tiles")
def test_the_second_pass_holds_nothing_of_the_first(monkeypatch):
    c = case(T, H, V, torch.float16, "cpu", bias=True)
    low_halves = linear_logp_triton.low_halves
    made = []

    def seen(out, pieces):
        gc.collect()  # the interpreter leaves cycles
        assert not made or made[-1]() is None
        low = low_halves(out, pieces)
        made.append(weakref.ref(low))
        return low

    monkeypatch.setattr(linear_logp_triton, "low_halves", seen)
    monkeypatch.setattr(linear_logp_triton, "HELD", 128 * (UNIT + H) * 2)
    monkeypatch.setattr(linear_logp_triton, "SLAB_NUMBERS", 128 * H)
    logp_gradients(c)
    assert len(made) == 2


@pytest.mark.usefixtures("large_tiles")
def test_pieces_over_rows_that_are_written_are_noticed(monkeypatch):
    c = in_one_piece(torch.float16, grpo_gradients)[0]
    whole = [in_one_piece(torch.float16, made)[1] for made in (logp_gradients, grpo_gradients)]

    def astray(plan):
        def planned(*arguments):
            pieces = plan(*arguments)
            return pieces and tuple(
                replace(x, at=max(0, x.at - x.last * H)) if x.memory else x for x in pieces
            )

        return planned

    for module, name, limit, value in (
        (linear_logp_triton, "one_after_another", "HELD", T * (UNIT + H) * 2),
        (linear_grpo_triton, "together", "CHUNK", SMALL),
    ):
        monkeypatch.setattr(module, name, astray(getattr(module, name)))
        monkeypatch.setattr(module, limit, value)
    broken = logp_gradients(c), grpo_gradients(c)
    for good, bad in zip(whole, broken, strict=True):
        assert not all(torch.equal(a, b) for a, b in zip(good, bad, strict=True))


def kernels_of_rows(monkeypatch):
    """For each row of the weight gradient, which of the two kernels its unfinished sums meet, where
    only a gradient of 1000 rows and more is large; and which they would, judged by the piece."""
    met: dict[int, set[str]] = {}
    by_piece: dict[int, set[str]] = {}
    widths_of = accumulate.hopper_widths

    def seen(pieces):
        lone = [replace(x, rows=0) for x in pieces]
        for found, judged in ((met, pieces), (by_piece, lone)):
            for x, width in zip(pieces, widths_of(judged), strict=True):
                if x.trans_a and not (x.first and x.last):
                    for row in range(x.low.data_ptr(), x.low.data_ptr() + x.low.nbytes, 2 * H):
                        found.setdefault(row, set()).add("hopper" if width else "generic")
        return [0] * len(pieces)

    monkeypatch.setattr(linear_grpo_triton, "CHUNK", SMALL)
    monkeypatch.setattr(accumulate, "_fits_hopper", lambda x: True)
    monkeypatch.setattr(accumulate, "_processors", lambda device: 132)
    monkeypatch.setattr(accumulate, "tile_of", lambda m, *_: LARGE if m >= 1000 else SAFE)
    monkeypatch.setattr(accumulate, "hopper_widths", seen)
    grpo_gradients(case(T, H, V, torch.float16, "cpu", bias=True))
    assert len(met) == len(by_piece) == V
    return met.values(), by_piece.values()


@pytest.mark.usefixtures("large_tiles")
def test_unfinished_sums_meet_one_kernel_whatever_the_pieces(monkeypatch):
    met, by_piece = kernels_of_rows(monkeypatch)
    assert all(kernels == {"hopper"} for kernels in met)
    assert {"hopper", "generic"} in by_piece
