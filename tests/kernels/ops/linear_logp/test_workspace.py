"""Where chunks of the logits lie: never where something is yet to be read, nor beyond a buffer."""

import functools
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_logp_suite import case, gradients, one_sequence_loss, run_ours, upstreams
from planning import H200
from rlk_kernels import memory
from rlk_kernels.losses.linear_grpo import launch as linear_grpo
from rlk_kernels.losses.linear_grpo import plan as linear_grpo_plan
from rlk_kernels.matmul import plan as matmul
from rlk_kernels.matmul.accumulate import plan as accumulate
from rlk_kernels.matmul.tiles import SAFE, Tile
from rlk_kernels.matmul.tiles import STORE as LARGE
from rlk_kernels.ops.linear_logp import launch, plan
from rlk_kernels.ops.linear_logp.workspace import UNIT, all_at_once, block_elements, one_at_a_time
from torch.multiprocessing.reductions import StorageWeakRef

T, H, V = 320, 128, 1100
SMALL = 550 << 10
"""Bytes of a chunk for which the first has room in the gradient and in its lower halves."""
SIZES = {
    "t": st.integers(1, 20000), "v": st.integers(1, 200000), "k": st.integers(0, 5000),
    "block": st.integers(-1000, 1 << 28),
}  # fmt: skip


def trouble(vocab_chunks, t, v, k, block, at_once):
    """What is wrong with them, by name."""
    faults = set()
    edges = [vocab.first for vocab in vocab_chunks] + [v]
    if edges != [0] + [vocab.last for vocab in vocab_chunks] or sorted(set(edges)) != edges:
        faults.add("not every column once, front to back")
    for i, vocab in enumerate(vocab_chunks):
        end = vocab.offset + t * vocab.width
        if vocab.width % UNIT or vocab.width < vocab.last - vocab.first:
            faults.add("width")
        if vocab.buffer == 0 and end > max(block, t * UNIT):
            faults.add("beyond the block")
        if vocab.buffer and (vocab.offset < vocab.last * k or end > v * k):
            faults.add("rows that are written while it is read, or beyond the last")
        for other in vocab_chunks[i + 1 :] if at_once else []:
            shared = min(end, other.offset + t * other.width) > max(vocab.offset, other.offset)
            if vocab.buffer == other.buffer and shared:
                faults.add("two in one place")
    return faults


@settings(max_examples=300, deadline=None)
@given(**SIZES, spare=st.booleans(), widest=st.integers(1, 200000))
def test_chunks_one_at_a_time_lie_where_nothing_else_is(t, v, k, block, spare, widest):
    vocab_chunks = one_at_a_time(t, v, k, block, spare, widest, 132)
    assert not trouble(vocab_chunks, t, v, k, block, False)
    assert spare or not any(vocab.buffer for vocab in vocab_chunks)
    assert all(vocab.width <= max(widest, UNIT) for vocab in vocab_chunks)
    assert block_elements(vocab_chunks, t) <= max(block, t * UNIT, 0)


@settings(max_examples=300, deadline=None)
@given(**SIZES, spares=st.integers(1, 2))
def test_chunks_all_at_once_lie_where_nothing_else_is(t, v, k, block, spares):
    vocab_chunks = all_at_once(t, v, k, block, spares, 132)
    if vocab_chunks is None:
        assert t * v > block - t * UNIT  # no room in the block alone
    else:
        assert not trouble(vocab_chunks, t, v, k, block, True)
        assert {vocab.buffer for vocab in vocab_chunks} <= set(range(spares + 1))


def test_the_memory_of_a_gradient_is_used():
    """A whole chunk of 4096 tokens at H=4096 beside a block of 448 MiB, where it takes 1187."""
    block = 448 << 19
    vocab_chunks = all_at_once(4096, 151936, 4096, block, 1, 132)
    assert vocab_chunks
    assert sum(x.width for x in vocab_chunks if x.buffer) > 80000
    vocab_chunks = one_at_a_time(16384, 151936, 4096, 160 << 19, True, 151936, 132)
    assert len(vocab_chunks) < 16
    assert sum(x.width for x in vocab_chunks if x.buffer) > 100000
    assert len(one_at_a_time(16384, 151936, 4096, 160 << 19, False, 151936, 132)) >= 30


@pytest.mark.parametrize("moved", [{"offset": -1}, {"buffer": 1}, {"first": 1}, {"width": UNIT}])
def test_a_chunk_in_the_wrong_place_is_noticed(moved):
    vocab_chunks = all_at_once(4096, 151936, 4096, 448 << 19, 1, 132)
    assert not trouble(vocab_chunks, 4096, 151936, 4096, 448 << 19, True)
    (name, by), last = *moved.items(), vocab_chunks[-1 if "buffer" in moved else -2]
    wrong = replace(last, **{name: getattr(last, name) + by})
    assert trouble(
        [wrong if vocab is last else vocab for vocab in vocab_chunks],
        4096,
        151936,
        4096,
        448 << 19,
        True,
    )


@pytest.fixture
def large_tiles(monkeypatch):
    """No bit's, but the interpreter's time."""
    monkeypatch.setattr(matmul, "INTERPRETED_LOGITS", Tile(128, 256, 128, 4, 1))
    for module in (matmul, accumulate):
        monkeypatch.setattr(module, "INTERPRETED", Tile(128, 256, 256, 4, 1))


def grpo_gradients(c):
    leaves = [x.detach().clone().requires_grad_() for x in (c.hidden, c.weight, c.bias)]
    return torch.autograd.grad(T * one_sequence_loss(c, leaves)[0], leaves)[:2]


def logp_gradients(c):
    return gradients(c, run_ours(c, "triton"), upstreams(c))


@functools.cache
def in_one_chunk(dtype, made):
    """(case, its gradients), once for all tests."""
    c = case(T, H, V, dtype, "cpu", bias=True)
    return c, made(c)


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize(
    ("dtype", "chunk", "chunks", "buffers"),
    [
        (torch.float16, SMALL, 2, {0, 1, 2}),
        (torch.float16, 900 << 10, 1, {0, 1}),
        (torch.float32, 1200 << 10, 2, {0, 1}),
        pytest.param(torch.float32, 1600 << 10, 1, {0, 1}, marks=pytest.mark.whole_matrix),
    ],
)
def test_vocab_chunks_change_no_bit_of_the_grpo_gradients(
    dtype, chunk, chunks, buffers, monkeypatch
):
    c, whole = in_one_chunk(dtype, grpo_gradients)
    monkeypatch.setattr(linear_grpo_plan, "CHUNK_BYTES", chunk)
    planned = linear_grpo_plan.chunks_of(T, V, H, c.hidden.element_size(), True, 132)
    assert len(planned) == chunks
    assert {vocab.buffer for _, vocab_chunks in planned for vocab in vocab_chunks} == buffers
    assert all(torch.equal(a, b) for a, b in zip(whole, grpo_gradients(c), strict=True))


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("alone", [0, 1])
def test_a_gradient_made_without_the_other_has_the_same_bits(alone, monkeypatch):
    c, whole = in_one_chunk(torch.float16, grpo_gradients)
    monkeypatch.setattr(linear_grpo_plan, "CHUNK_BYTES", SMALL)
    leaves = [c.hidden, c.weight]
    leaves[alone] = leaves[alone].detach().clone().requires_grad_()
    loss, _ = one_sequence_loss(c, [*leaves, c.bias])
    assert torch.equal(torch.autograd.grad(T * loss, leaves[alone])[0], whole[alone])


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize(
    ("dtype", "passes"),
    [
        pytest.param(torch.float16, 1, marks=pytest.mark.whole_matrix),
        (torch.float16, 2),
        (torch.float32, 1),
    ],
)
def test_vocab_chunks_change_no_bit_of_the_gradients(dtype, passes, monkeypatch):
    c, whole = in_one_chunk(dtype, logp_gradients)
    rows = T if passes == 1 else 128
    free = UNIT * rows
    vocab_chunks = one_at_a_time(rows, V, H, free, True, V if passes == 1 else rows, 132)
    assert {vocab.buffer for vocab in vocab_chunks} == {0, 1}
    halves = rows * H if dtype == torch.float16 else 0
    monkeypatch.setattr(plan, "WORKSPACE_BYTES", (free + halves) * c.hidden.element_size())
    monkeypatch.setattr(plan, "ONE_PASS_ELEMENTS", rows * H)
    parts = logp_gradients(c)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


@pytest.mark.usefixtures("large_tiles")
def test_the_second_pass_holds_nothing_of_the_first(monkeypatch):
    c = case(T, H, V, torch.float16, "cpu", bias=True)
    lo_accumulator = launch.lo_accumulator
    made = []

    def recorded(out, calls):
        assert not made or made[-1]() is None
        lo = lo_accumulator(out, calls)
        made.append(weakref.ref(lo))
        return lo

    monkeypatch.setattr(launch, "lo_accumulator", recorded)
    # Without the products themselves: the interpreter leaves cycles that hold their arguments.
    monkeypatch.setattr(launch, "accumulate", lambda *_: "triton")
    monkeypatch.setattr(plan, "WORKSPACE_BYTES", 128 * (UNIT + H) * 2)
    monkeypatch.setattr(plan, "ONE_PASS_ELEMENTS", 128 * H)
    logp_gradients(c)
    assert len(made) == 2


def statistics_held(monkeypatch):
    """Bytes of statistics that chunks of tokens hold: for each chunk as it begins, and as its
    hidden states are scaled."""
    asked, held = [], []

    def note():
        held.append(sum(size for storage, size in asked if not storage.expired()))

    def watched(make):
        def asks(*arguments):
            if make is memory.empty:  # the first of a chunk
                note()
            planes = make(*arguments)
            one = planes if isinstance(planes, torch.Tensor) else planes[0]
            storage = one.untyped_storage()
            asked.append((StorageWeakRef(storage), storage.nbytes()))
            return planes

        return asks

    def scaled(x, c, out):
        note()
        return out

    monkeypatch.setattr(linear_grpo_plan, "CHUNK_BYTES", SMALL)
    for make in (memory.empty, memory.empties):
        monkeypatch.setattr(linear_grpo, make.__name__, watched(make))
    monkeypatch.setattr(linear_grpo, "scale_rows", scaled)
    # Without the kernels: the interpreter leaves cycles that hold their arguments.
    for kernel in (
        "pick",
        "run_tiles",
        "finish",
        "rebase",
        "clear_dead_rows",
        "store_id_gradients",
    ):
        monkeypatch.setattr(linear_grpo, kernel, lambda *_: None)
    monkeypatch.setattr(linear_grpo, "accumulate", lambda *_: "triton")
    monkeypatch.setattr(linear_grpo, "token_gradient", lambda _, ids, *__: [ids.float()] * 3)
    c = case(T, H, V, torch.float16, "cpu")
    one_sequence_loss(c, [c.hidden, c.weight.requires_grad_()])
    return held


@pytest.mark.usefixtures("large_tiles")
def test_of_the_tiles_statistics_only_what_is_read_again_is_held(monkeypatch):
    """n of the tiles, and three numbers a row; nothing of the chunk before."""
    nodes = -(-V // 256)
    assert statistics_held(monkeypatch) == [0, 4 * 256 * (nodes + 3), 0, 4 * 64 * (nodes + 3)]


@pytest.mark.usefixtures("large_tiles")
def test_statistics_that_stay_are_noticed(monkeypatch):
    held, planes_of = [], linear_grpo.planes_of

    def keeping(*arguments):
        held.append(planes_of(*arguments))
        return held[-1]

    monkeypatch.setattr(linear_grpo, "planes_of", keeping)
    nodes = -(-V // 256)
    first, both = 8 * 256 * nodes, 8 * T * nodes
    assert statistics_held(monkeypatch) == [0, first + 12 * 256, first, both + 12 * 64]


@pytest.mark.usefixtures("large_tiles")
def test_chunks_over_rows_that_are_written_are_noticed(monkeypatch):
    c = in_one_chunk(torch.float16, grpo_gradients)[0]
    whole = [in_one_chunk(torch.float16, made)[1] for made in (logp_gradients, grpo_gradients)]

    def astray(place):
        def planned(*arguments):
            vocab_chunks = place(*arguments)
            return vocab_chunks and tuple(
                replace(x, offset=max(0, x.offset - x.last * H)) if x.buffer else x
                for x in vocab_chunks
            )

        return planned

    for module, name, limit, value in (
        (plan, "one_at_a_time", "WORKSPACE_BYTES", T * (UNIT + H) * 2),
        (linear_grpo_plan, "all_at_once", "CHUNK_BYTES", SMALL),
    ):
        monkeypatch.setattr(module, name, astray(getattr(module, name)))
        monkeypatch.setattr(module, limit, value)
    broken = logp_gradients(c), grpo_gradients(c)
    for good, bad in zip(whole, broken, strict=True):
        assert not all(torch.equal(a, b) for a, b in zip(good, bad, strict=True))


def kernels_of_rows(monkeypatch):
    """For each row of the weight gradient, which of the two kernels its partial sums meet, where
    only a gradient of 1000 rows and more is large; and which they would, judged by the chunk."""
    met: dict[int, set[str]] = {}
    by_chunk: dict[int, set[str]] = {}

    def recorded(*partials):
        slices = tuple(accumulate.slice_of(x, H200) for x in partials)
        lone = tuple(x._replace(rows=0) for x in slices)
        for names, judged in ((met, slices), (by_chunk, lone)):
            widths = accumulate.hopper_widths(judged, H200, True)
            for x, width in zip(partials, widths, strict=True):
                if x.trans_a and not (x.first and x.last):
                    for row in range(x.lo.data_ptr(), x.lo.data_ptr() + x.lo.nbytes, 2 * H):
                        names.setdefault(row, set()).add("hopper" if width else "generic")
        return "triton"

    monkeypatch.setattr(linear_grpo_plan, "CHUNK_BYTES", SMALL)
    monkeypatch.setattr(accumulate, "_fits_hopper", lambda x: True)
    monkeypatch.setattr(accumulate, "partial_tile_for", lambda m, *_: LARGE if m >= 1000 else SAFE)
    monkeypatch.setattr(linear_grpo, "accumulate", recorded)
    grpo_gradients(case(T, H, V, torch.float16, "cpu", bias=True))
    assert len(met) == len(by_chunk) == V
    return met.values(), by_chunk.values()


@pytest.mark.usefixtures("large_tiles")
def test_partial_sums_meet_one_kernel_whatever_the_chunks(monkeypatch):
    met, by_chunk = kernels_of_rows(monkeypatch)
    assert all(kernels == {"hopper"} for kernels in met)
    assert {"hopper", "generic"} in by_chunk
