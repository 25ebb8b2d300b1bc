"""Paged attention whose keys are split by a list made on the device: the bits of one walk,
whatever the lengths, the table's width, the room there is, and the prefixes that are shared."""

import math
from dataclasses import replace

import pytest
import torch
from kernel_suite import packed, paged_cache, same
from rlk_kernels import device
from rlk_kernels.ops.attention import forward as attention_forward
from rlk_kernels.ops.attention import merge, schedule
from rlk_kernels.ops.attention.call import AttentionCall
from schedule_suite import CHUNK, DECODE, HEADS, MIXED, PAGE, wide_batch


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(attention_forward, "CHUNK", CHUNK)
    few_programs(monkeypatch, 12)


def few_programs(monkeypatch, count):
    """A device that has room for so many pieces."""
    here = replace(device.facts(torch.device("cpu")), processors=count)
    for module in (attention_forward, merge, schedule):
        monkeypatch.setattr(module, "facts", lambda device: here)
    pieces = dict.fromkeys((16, 32, 64, 128), 1)
    monkeypatch.setattr(schedule, "PIECES", pieces)
    monkeypatch.setattr(attention_forward, "PIECES", pieces)


def run(q, k_cache, v_cache, cu_q, lens, table, window=None, **more):
    call = AttentionCall(q, k_cache, v_cache, cu_q.int(), lens.int(), table, True, 0.25, window)
    return attention_forward.forward(call, **more)[:2]


def batch(lens_q, lens_k, width=0):
    """Paged inputs of `run`, the table wider than it must be."""
    q, k_cache, v_cache, wide, lens, cu_q = wide_batch(lens_q, lens_k, width)
    return q, k_cache, v_cache, cu_q, lens, wide


@pytest.mark.parametrize(("lens", "window"), [(DECODE, None), (MIXED, 50)])
def test_split_keys_have_the_bits_of_one_walk(lens, window, monkeypatch):
    x = batch(*lens)
    one = run(*x, window=window, split=False)
    assert same(run(*x, window=window, split=True), one)
    assert same(run(*batch(*lens, width=60), window=window, split=True), one)
    few_programs(monkeypatch, 3)  # longer pieces
    assert same(run(*x, window=window, split=True), one)


@pytest.mark.parametrize(("queries", "keys"), [(1, 300), (12, 70), (5, 33), (0, 9), (1, 0)])
@pytest.mark.parametrize("window", [None, 50])
def test_a_lone_sequence_needs_no_list(queries, keys, window, monkeypatch):
    made = planned(monkeypatch)
    x = batch([queries], [keys], width=40)
    one = run(*x, window=window, split=False)
    for programs in (12, 2):
        few_programs(monkeypatch, programs)
        assert same(run(*x, window=window, split=True), one)
    monkeypatch.setattr(attention_forward, "SCRATCH_BYTES", 400)  # longer ranges
    assert same(run(*x, window=window, split=True), one)
    assert not made


@pytest.fixture(params=["the list's kernel", "the kernel before"])
def who_compares(request, monkeypatch):
    if request.param == "the kernel before":
        monkeypatch.setattr(schedule, "COMPARED", 0)


def group(members=2, shared=64, prompts=2, extra=(3, 33)):
    """Sequences that answer `prompts`, `members` each: (inputs of `run`, block tables that share
    their prompts' blocks, and that do not)."""
    tails = [extra[(i + p) % len(extra)] for p in range(prompts) for i in range(members)]
    q, k, v, cu_q, cu_k = packed(
        [1] * len(tails), [shared + n for n in tails], *HEADS, torch.float32, "cpu"
    )
    for b in range(len(tails)):
        leader = b // members * members
        for x in (k, v):
            x[cu_k[b] : cu_k[b] + shared] = x[cu_k[leader] : cu_k[leader] + shared]
    k_cache, v_cache, table, lens = paged_cache(k, v, cu_k, page=PAGE)
    joint = table.clone()
    for b in range(len(tails)):
        joint[b, : shared // PAGE] = table[b // members * members, : shared // PAGE]
    return (q, k_cache, v_cache, cu_q, lens), joint, table


def planned(monkeypatch):
    """The lists that are made, as they are made."""
    made, make = [], attention_forward.schedule

    def spy(cache, of_list, lists, call):
        make(cache, of_list, lists, call)
        made.append(entries(lists[0], call.batch))

    monkeypatch.setattr(attention_forward, "schedule", spy)
    return made


def entries(plan, batch):
    """The first program's, plane by plane."""
    size = 2 * batch + 2
    return plan[: schedule.PLANES * size].view(schedule.PLANES, size)


def row(plan, plane):
    return plan[plane.value]


@pytest.mark.usefixtures("who_compares")
def test_a_shared_prefix_is_read_once_and_changes_no_bit(monkeypatch):
    x, joint, separate = group()
    made = planned(monkeypatch)
    shared_out = run(*x, joint, split=True)
    alone = run(*x, separate, split=True)
    assert same(shared_out, run(*x, separate, split=False))
    assert same(shared_out, alone)
    b = x[4].numel()
    leaders = row(made[0], schedule.LEADER)[:b].tolist()
    assert leaders == [0, 0, 2, 2]
    assert row(made[1], schedule.LEADER)[:b].tolist() == [-1] * b
    chunks = [int(row(p, schedule.COUNT)[: 2 * b].sum()) for p in made]
    assert chunks[1] - chunks[0] == (b - 2) * 64 // CHUNK


@pytest.mark.usefixtures("who_compares")
def test_prefixes_within_prefixes_are_taken_apart_where_less_is_shared(monkeypatch):
    """All share a chunk; two groups share more. And one that shares all of its keys."""
    x, joint, _ = group(members=2, shared=64, prompts=2, extra=(0, 33))
    joint[:, : CHUNK // PAGE] = joint[0, : CHUNK // PAGE]
    made = planned(monkeypatch)
    assert same(run(*x, joint, split=True), run(*x, joint, split=False))
    assert row(made[0], schedule.LEADER)[:4].tolist() == [0, 0, 2, 2]
    assert row(made[0], schedule.FIRST)[1:9:2].tolist() == [2] * 4


def test_scratch_is_bounded_and_little_of_it_changes_no_bit(monkeypatch):
    x = *group()[0], group()[1]
    one = run(*x, split=False)
    monkeypatch.setattr(attention_forward, "SCRATCH_BYTES", 64)
    sizes, plan = [], attention_forward._plan

    def spy(*args):
        entries = plan(*args)
        sizes.append(4 * sum(map(math.prod, entries.scratch)))
        return entries

    monkeypatch.setattr(attention_forward, "_plan", spy)
    assert same(run(*x, split=True), one)
    assert sizes[0] <= 64


def test_work_is_split_where_it_pays(monkeypatch):
    """One long sequence among many short ones: its keys are split, theirs are not."""
    made = planned(monkeypatch)
    x = batch([1] * 5, [40] * 4 + [300])
    assert same(run(*x, split=True), run(*x, split=False))
    starts = row(made[0], schedule.ITEMS)[: 2 * 5 + 1].tolist()
    assert starts[1:9:2] == [0, 1, 2, 3]  # one piece each
    assert starts[10] - starts[9] > 3
    assert row(made[0], schedule.ROWS)[5] == HEADS[0] // HEADS[1]  # of one query


@pytest.mark.usefixtures("who_compares")
def test_the_first_blocks_alone_share_nothing(monkeypatch):
    """Tables that begin with the same block and go on with others, and a sequence that is shorter
    than a chunk."""
    x, joint, separate = group(members=2, shared=64, prompts=2, extra=(3, 33))
    separate[:, 0] = joint[:, 0]
    x[4][1] = CHUNK - 1
    made = planned(monkeypatch)
    assert same(run(*x, separate, split=True), run(*x, separate, split=False))
    assert same(run(*x, joint, split=True), run(*x, joint, split=False))
    assert row(made[0], schedule.LEADER)[:4].tolist() == [-1] * 4
    assert row(made[1], schedule.LEADER)[:4].tolist() == [-1, -1, 2, 2]


def merges(monkeypatch):
    """The calls whose pieces are merged."""
    calls, launch = [], merge.merge_parts

    def spy(cache, plan, call, scratch, chunk):
        calls.append(call)
        launch(cache, plan, call, scratch, chunk)

    monkeypatch.setattr(attention_forward, "merge_parts", spy)
    return calls


@pytest.mark.parametrize(
    ("lens", "window"),
    [
        pytest.param(([200], [200]), None, marks=pytest.mark.whole_matrix),
        (([200], [300]), None),
        pytest.param(([90], [130]), CHUNK, marks=pytest.mark.whole_matrix),
        (([100, 0, 1, 50], [140, 5, 90, 50]), CHUNK),
    ],
)
def test_blocks_of_rows_that_are_one_piece_are_not_merged(lens, window, monkeypatch):
    """Also where fewer queries are there than the shape has."""
    merged = merges(monkeypatch)
    x = batch(*lens, width=40)
    one = run(*x, window=window, split=False)
    assert same(run(*x, window=window, split=True), one)
    fewer = [*x[:3], x[3].clamp(max=70), *x[4:]]
    out, lse = run(*fewer, window=window, split=True)
    expected = run(*fewer, window=window, split=False)
    assert same((out[:70], lse[:, :70]), (expected[0][:70], expected[1][:, :70]))
    assert not merged
    few_programs(monkeypatch, 100)
    assert same(
        run(*x, window=window and CHUNK + 1, split=True)[:1],
        run(*x, window=window and CHUNK + 1, split=False)[:1],
    )
    assert merged


@pytest.mark.parametrize("fault", ["order", "first", "leader"])
def test_a_merge_that_goes_wrong_is_noticed(fault, monkeypatch):
    x, joint, _ = group()
    one = run(*x, joint, split=False)
    assert same(run(*x, joint, split=True), one)
    make = attention_forward.schedule

    def broken(made, b):
        flat = made.clone()
        plan = entries(flat, b)
        if fault == "order":  # slots that lie elsewhere
            bases = row(plan, schedule.BASE)[1 : 2 * b : 2]
            bases.copy_(bases.flip(0))
        elif fault == "first":  # a chunk left out
            row(plan, schedule.FIRST)[3] += 1
        else:  # a prefix left out
            row(plan, schedule.LEADER)[b - 1] = -1
        return flat

    launch = merge.merge_parts

    def merge_by(cache, plan, call, scratch, chunk):
        launch(cache, plan, call, replace(scratch, entries=broken_entries[0]), chunk)

    broken_entries = []

    def both(cache, of_list, lists, call):
        make(cache, of_list, lists, call)
        broken_entries[:] = [broken(lists[0], call.batch)]

    monkeypatch.setattr(attention_forward, "schedule", both)
    monkeypatch.setattr(attention_forward, "merge_parts", merge_by)
    assert not same(run(*x, joint, split=True), one)
