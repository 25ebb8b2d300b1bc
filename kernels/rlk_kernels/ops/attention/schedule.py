"""A list of pieces of work, made on the device, for attention whose keys are split.

A piece is a block of packed rows and a range of chunks of its keys. The list depends on the lengths
of the sequences, not on the size of the block table: the host never reads it, and each replay of a
CUDA graph makes it again. Neither the division into pieces nor the program of a piece can change a
bit (`order.py`): a range that begins at the first chunk merges its chunks at once, and any other
range stores each chunk for `merge.py`, which continues from there. (It took longer when the program
that ends the last piece of some rows merged them, because a program waits for its own stores before
it can signal them. Few rows of a single sequence are merged that way, `hopper/merge_last.py`, as no
other program waits there.)

    pieces    k = max(1, n // tau) ranges of a sequence's n chunks. tau depends on the whole work:
              with enough sequences none is split, except for one much longer than the others
    slots     the memory of states until they are merged: at most SCRATCH_BYTES; tau grows until
              they fit
    prefixes  neighbours in the batch with one query each, whose tables begin with the same blocks
              (a group that answers one prompt): their common chunks are one entry, with the queries
              of all as its rows, and are read once

A batch of one sequence needs no list: its programs and `merge.py` compute the same numbers
themselves (`lone_sequence`), which saves two kernels.

Entry 2b is the prefix that sequence b leads (mostly empty); entry 2b + 1 is the rest of sequence b,
its suffix. Every program of the kernel computes all entries, int32[PLANES, 2B + 2], and writes some
of the pieces, int32[FIELDS] each, so that one kernel suffices and no program waits for another. For
a small batch the kernel compares the tables too; for a larger batch an earlier kernel does. The
kernel runs alone before every split call, or once before calls that share a list
(`shared_schedule.py`). It is short, because fetching its instructions takes most of its time.

B = sequences   R = sequences that share a block of rows at most
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.device import facts
from rlk_kernels.launching import ShapeCache, cdiv, launch, power_of_2
from rlk_kernels.memory import MemoryLayout, layout
from rlk_kernels.ops.attention.call import AttentionCall, AttentionPlan
from rlk_kernels.ops.attention.order import find_sequence
from rlk_kernels.ops.overlap import begin_overlapped

SCRATCH_BYTES = 31 << 20
"""The most bytes of states that are not merged yet, for any lengths; with the list below 32 MiB."""
PIECES = {16: 16, 32: 16, 64: 6, 128: 4}
"""Rows of a block -> pieces of a processor, if there is enough work (time only)."""

LISTED = 64
"""Pieces of a step of a program (time only)."""
COMPARED = 1024
"""The most blocks of tables for which the kernel of the list compares them (time only)."""

PLANES = 8
ITEMS, FIRST, COUNT, BASE, MEMBERS, LEADER, ROWS, TAU = (tl.constexpr(i) for i in range(PLANES))
"""The planes of a list. For each entry: the pieces before it, its first chunk, its chunks, the row
of its first slot. For each sequence: the sequences that share its prefix, the sequence that leads
the prefix (-1: none), the rows to merge before it. Then tau."""
FIELDS = tl.constexpr(12)


@triton.jit
def ranges_of(n, tau):
    """(ranges of n chunks, chunks of a range)."""
    count = tl.maximum(n // tau, 1)
    length = tl.maximum(tl.cdiv(n, count), 1)
    return tl.maximum(tl.cdiv(n, length), 1), length


@triton.jit
def _rows_of_slots(prefix, members, suffix, shares, queries, G, tau):
    """(rows of the slots of each sequence's prefix, rows of the slots of its suffix).

    A first range has one slot for its merged chunks, another range one slot for each chunk. A
    sequence in one range needs no slot.
    """
    _, length = ranges_of(prefix, tau)
    of_prefix = tl.where(prefix > 0, (prefix - length + 1) * members * G, 0)
    ranges, length = ranges_of(suffix, tau)
    slots = tl.where(ranges > 1, suffix - length + 1, 0)
    return of_prefix, tl.where(shares > 0, suffix, slots) * queries * G


@triton.jit
def _shared_chunks(
    table_ptr, cu_q_ptr, lens_ptr, stride_table, R, b, live, CHUNK: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """The number of leading chunks of sequences b[N] with the same blocks as the sequence before,
    if both have one query and are in one block of rows."""
    asked = live & (b % R != 0)
    start = tl.load(cu_q_ptr + b, mask=asked, other=0)
    lone = (start - tl.load(cu_q_ptr + b - 1, mask=asked, other=0) == 1) & (
        tl.load(cu_q_ptr + b + 1, mask=asked, other=0) - start == 1
    )
    keys = tl.load(lens_ptr + b, mask=asked, other=0)
    keys = tl.minimum(keys, tl.load(lens_ptr + b - 1, mask=asked, other=0))
    most = tl.where(asked & lone, keys // CHUNK, 0)
    at = table_ptr + b.to(tl.int64) * stride_table
    open = most > 0
    first = tl.load(at, mask=open, other=0)
    open = open & (first == tl.load(at - stride_table, mask=open, other=0))
    shared = tl.zeros_like(b)
    at = at[:, None] + tl.arange(0, CHUNK // PAGE)[None, :]
    while tl.max(open.to(tl.int32), 0) > 0:
        mine = tl.load(at, mask=open[:, None], other=0)
        theirs = tl.load(at - stride_table, mask=open[:, None], other=0)
        open = open & (tl.min((mine == theirs).to(tl.int32), 1) > 0)
        shared += open.to(tl.int32)
        open = open & (shared < most)
        at += CHUNK // PAGE
    return shared


@triton.jit(do_not_specialize=["R", "stride_table"])
def _shared_kernel(
    shared_ptr, table_ptr, cu_q_ptr, lens_ptr, stride_table, R, CHUNK: tl.constexpr,
    PAGE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """`_shared_chunks` of one sequence in each program."""
    begin_overlapped(OVERLAP)
    b = tl.program_id(0) + tl.arange(0, 1)
    shared = _shared_chunks(table_ptr, cu_q_ptr, lens_ptr, stride_table, R, b, b >= 0, CHUNK, PAGE)
    tl.store(shared_ptr + b, shared)


@triton.jit
def _group(plan_ptr, pitch, shared_ptr, b, B, R: tl.constexpr):
    """(chunks of the prefix that b leads, its members); writes the members' prefixes and leaders.

    A group ends where a sequence shares less with the sequence before it than with the one after
    it.
    """
    at = shared_ptr + b
    shared = tl.load(at, mask=b < B, other=0)
    following = tl.load(at + 1, mask=b + 1 < B, other=0)
    leads = (shared == 0) | (shared < following)
    members = tl.zeros_like(b) + 1
    prefix = tl.zeros_like(b) + (1 << 30)
    open = leads & (b < B)
    for i in range(1, R):
        here = tl.load(at + i, mask=b + i < B, other=0)
        following = tl.load(at + i + 1, mask=b + i + 1 < B, other=0)
        open = open & (here != 0) & (here >= following)
        members += open.to(tl.int32)
        prefix = tl.where(open, tl.minimum(prefix, here), prefix)
    prefix = tl.where(members > 1, prefix, 0)
    for i in range(R):
        mine = (prefix > 0) & (i < members)
        tl.store(plan_ptr + LEADER * pitch + b + i, b, mask=mine)
        tl.store(plan_ptr + FIRST * pitch + 2 * (b + i) + 1, prefix, mask=mine)
    tl.debug_barrier()
    return prefix, members


@triton.jit(do_not_specialize=["stride_table", "B", "window", "capacity", "target"])
def _schedule_kernel(
    plan_ptr, pieces_ptr, table_ptr, cu_q_ptr, lens_ptr, shared_ptr, stride_table, B, window,
    capacity, target,
    HK: tl.constexpr, G: tl.constexpr, BM: tl.constexpr, CHUNK: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr, SHARE: tl.constexpr,
    COMPARES: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr, LISTED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Make the list, with one sequence in a lane. COMPARES: this kernel compares the tables, and
    all programs write the same results to the same memory."""
    begin_overlapped(OVERLAP)
    pitch = 2 * B + 2
    plan_ptr += (
        tl.program_id(0) * (TAU + 1) * pitch
    )  # the merge reads the entries of the first program
    b = tl.arange(0, BLOCK)
    live = b < B
    queries = tl.load(cu_q_ptr + b + 1, mask=live, other=0) - tl.load(
        cu_q_ptr + b, mask=live, other=0
    )
    if PAGED:
        keys = tl.load(lens_ptr + b, mask=live, other=0)
    else:
        keys = tl.load(lens_ptr + b + 1, mask=live, other=0)
        keys -= tl.load(lens_ptr + b, mask=live, other=0)
    first = tl.zeros_like(b)
    if WINDOWED:
        visible = keys - queries + 1 if CAUSAL else keys
        first = tl.maximum(visible - window, 0) // CHUNK
    end = tl.maximum(tl.cdiv(keys, CHUNK), first)
    shared = tl.zeros_like(b)
    if COMPARES:
        shared = _shared_chunks(
            table_ptr, cu_q_ptr, lens_ptr, stride_table, BM // G, b, live, CHUNK, PAGE
        )
    elif SHARE:
        shared = tl.load(shared_ptr + b, mask=live, other=0)
    prefix = tl.zeros_like(b)
    members = prefix
    tl.store(plan_ptr + FIRST * pitch + 2 * b + 1, first, mask=live)
    tl.store(plan_ptr + LEADER * pitch + b, -1, mask=live)
    tl.debug_barrier()
    if SHARE and tl.max(shared, 0) > 0:
        if COMPARES:
            tl.store(shared_ptr + b, shared, mask=live)
            tl.debug_barrier()
        prefix, members = _group(plan_ptr, pitch, shared_ptr, b, B, BM // G)
        first = tl.load(plan_ptr + FIRST * pitch + 2 * b + 1, mask=live, other=0)
        of_prefix, of_suffix = _rows_of_slots(
            prefix, members, end - first, first, queries, G, 1 << 30
        )
        if tl.sum(of_prefix + of_suffix, 0) > capacity:  # they would never fit: nothing is shared
            prefix = tl.zeros_like(b)
            first = tl.zeros_like(b)
            tl.store(plan_ptr + LEADER * pitch + b, -1, mask=live)
    shares = first
    if WINDOWED:
        shares = tl.zeros_like(b)
    suffix = end - first

    blocks = tl.cdiv(queries * G, BM)
    work = tl.sum(blocks * suffix + prefix, 0) * HK
    tau = tl.maximum(tl.cdiv(work, target), 1)
    of_prefix, of_suffix = _rows_of_slots(prefix, members, suffix, shares, queries, G, tau)
    while tl.sum(of_prefix + of_suffix, 0) > capacity:
        tau *= 2
        of_prefix, of_suffix = _rows_of_slots(prefix, members, suffix, shares, queries, G, tau)

    ranges, _ = ranges_of(suffix, tau)
    prefix_ranges, _ = ranges_of(prefix, tau)
    prefix_items = tl.where(prefix > 0, prefix_ranges, 0)
    items = tl.where((suffix > 0) | (shares == 0), blocks * ranges, 0)
    merged = tl.where((ranges > 1) | (shares > 0), queries * G, 0)
    both = prefix_items + items
    before = tl.cumsum(both, 0) - both
    rows = of_prefix + of_suffix
    base = tl.cumsum(rows, 0) - rows
    at = plan_ptr + 2 * b
    tl.store(at + ITEMS * pitch, before, mask=live)
    tl.store(at + ITEMS * pitch + 1, before + prefix_items, mask=live)
    tl.store(at + FIRST * pitch, 0, mask=live)
    tl.store(at + FIRST * pitch + 1, first, mask=live)
    tl.store(at + COUNT * pitch, prefix, mask=live)
    tl.store(at + COUNT * pitch + 1, suffix, mask=live)
    tl.store(at + BASE * pitch, base, mask=live)
    tl.store(at + BASE * pitch + 1, base + of_prefix, mask=live)
    tl.store(plan_ptr + MEMBERS * pitch + b, members, mask=live)
    tl.store(plan_ptr + ROWS * pitch + b, tl.cumsum(merged, 0) - merged, mask=live)
    total = tl.sum(both, 0)
    tl.store(plan_ptr + ITEMS * pitch + 2 * B, total)
    tl.store(plan_ptr + ROWS * pitch + B, tl.sum(merged, 0))
    tl.store(plan_ptr + TAU * pitch, tau)
    tl.debug_barrier()
    for start in range(tl.program_id(0) * LISTED, total, tl.num_programs(0) * LISTED):
        _list_pieces(
            plan_ptr, pieces_ptr, cu_q_ptr, lens_ptr, B, start + tl.arange(0, LISTED), total, BM,
            CHUNK, PAGED, STEPS,
        )  # fmt: skip


@triton.jit
def last_before(ptr, count, x, STEPS: tl.constexpr):
    """The last i < count <= 2**STEPS with ptr[i] <= x, for each x[N]; ptr ascends from a number of
    at most x."""
    low = tl.zeros_like(x)
    high = low + count
    for _ in range(STEPS):
        middle = (low + high) // 2
        below = tl.load(ptr + middle) <= x
        high = tl.where(below | (middle == low), high, middle)
        low = tl.where(below, middle, low)
    return low


@triton.jit
def _list_pieces(
    plan_ptr, pieces_ptr, cu_q_ptr, lens_ptr, B, item, total, BM: tl.constexpr, CHUNK: tl.constexpr,
    PAGED: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Write the pieces item[N], which `piece` reads.

    A prefix is a sequence of its members' queries, all of which see every key of its chunks.
    """
    pitch = 2 * B + 2
    entry = last_before(plan_ptr + ITEMS * pitch, 2 * B, item, STEPS)
    listed = item < total
    entry = tl.where(listed, entry, 0)
    b = entry // 2
    suffix = entry % 2 == 1
    within = item - tl.load(plan_ptr + ITEMS * pitch + entry)
    first = tl.load(plan_ptr + FIRST * pitch + entry)
    count = tl.load(plan_ptr + COUNT * pitch + entry)
    members = tl.load(plan_ptr + MEMBERS * pitch + b)
    shared = suffix & (tl.load(plan_ptr + LEADER * pitch + b) >= 0)
    ranges, length = ranges_of(count, tl.load(plan_ptr + TAU * pitch))
    begin = first + within % ranges * length
    q_start = tl.load(cu_q_ptr + b)
    queries = tl.where(suffix, tl.load(cu_q_ptr + b + 1) - q_start, members)
    k_start = tl.zeros_like(b)
    keys = tl.load(lens_ptr + b)
    if not PAGED:
        k_start = keys
        keys = tl.load(lens_ptr + b + 1) - keys
    at = pieces_ptr + item * FIELDS
    tl.store(at, b, mask=listed)
    tl.store(at + 1, q_start, mask=listed)
    tl.store(at + 2, queries, mask=listed)
    tl.store(at + 3, k_start, mask=listed)
    tl.store(at + 4, tl.where(suffix, keys, (first + count) * CHUNK + members), mask=listed)
    tl.store(at + 5, within // ranges * BM, mask=listed)
    tl.store(at + 6, begin, mask=listed)
    tl.store(at + 7, tl.minimum(begin + length, first + count), mask=listed)
    tl.store(at + 8, (suffix & (ranges == 1) & (shared == 0)).to(tl.int32), mask=listed)
    tl.store(at + 9, ((begin == first) & (shared == 0)).to(tl.int32), mask=listed)
    tl.store(at + 10, tl.where(shared, first, first + length - 1), mask=listed)
    tl.store(at + 11, tl.load(plan_ptr + BASE * pitch + entry), mask=listed)


@triton.jit
def piece(pieces_ptr, item):
    """A piece: (sequence whose table it reads, first token, queries, start of keys, keys, first
    packed row, first chunk, chunk after its last, whether its rows have no other piece, whether it
    merges its chunks, last chunk of the first slot, row of that slot)."""
    at = pieces_ptr + item * FIELDS
    return (
        tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4),
        tl.load(at + 5), tl.load(at + 6), tl.load(at + 7), tl.load(at + 8), tl.load(at + 9),
        tl.load(at + 10), tl.load(at + 11),
    )  # fmt: skip


@triton.jit
def lone_sequence(
    cu_q_ptr, lens_ptr, window, capacity, target, HK: tl.constexpr, G: tl.constexpr,
    BM: tl.constexpr, CHUNK: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    PAGED: tl.constexpr,
):  # fmt: skip
    """The entry of a batch of one sequence, without a list: (first token, queries, start of keys,
    keys, first chunk, chunks, ranges, chunks of a range)."""
    q_start = tl.load(cu_q_ptr)
    queries = tl.load(cu_q_ptr + 1) - q_start
    keys = tl.load(lens_ptr)
    k_start = keys * 0
    if not PAGED:
        k_start = keys
        keys = tl.load(lens_ptr + 1) - keys
    first = k_start * 0
    if WINDOWED:
        visible = keys - queries + 1 if CAUSAL else keys
        first = tl.maximum(visible - window, 0) // CHUNK
    chunks = tl.maximum(tl.cdiv(keys, CHUNK) - first, 0)
    ranges = tl.maximum(chunks, 1)
    length = chunks * 0 + 1
    work = tl.cdiv(queries * G, BM) * chunks * HK
    if (work > target) | (
        chunks * queries * G > capacity
    ):  # otherwise tau is 1; divisions are slow
        tau = tl.maximum(tl.cdiv(work, target), 1)
        _, slots = _rows_of_slots(chunks * 0, chunks, chunks, chunks * 0, queries, G, tau)
        while slots > capacity:
            tau *= 2
            _, slots = _rows_of_slots(chunks * 0, chunks, chunks, chunks * 0, queries, G, tau)
        ranges, length = ranges_of(chunks, tau)
    return q_start, queries, k_start, keys, first, chunks, ranges, length


@triton.jit
def lone_piece(lone, item, G: tl.constexpr, BM: tl.constexpr):
    """The `piece` of a `lone_sequence` that a list would have."""
    q_start, queries, k_start, keys, first, chunks, ranges, length = lone
    block = item * 0
    if item >= ranges:
        block = item // ranges
    begin = first + (item - block * ranges) * length
    return (
        keys * 0, q_start, queries, k_start, keys, block * BM, begin,
        tl.minimum(begin + length, first + chunks), (ranges == 1).to(tl.int32),
        (begin == first).to(tl.int32), first + length - 1, keys * 0,
    )  # fmt: skip


@triton.jit
def whole_piece(
    cu_q_ptr, lens_ptr, block, B, G: tl.constexpr, BM: tl.constexpr, CHUNK: tl.constexpr,
    PAGED: tl.constexpr,
):  # fmt: skip
    """The `piece` of row block `block` (`order.find_sequence`) with all keys, at most one chunk."""
    b, q_start, queries, row = find_sequence(cu_q_ptr, block, B, G, BM)
    keys = tl.load(lens_ptr + b)
    k_start = keys * 0
    if not PAGED:
        k_start = keys
        keys = tl.load(lens_ptr + b + 1) - keys
    live = (row < queries * G).to(tl.int32)
    return (
        b, q_start, queries, k_start, keys, row, keys * 0, live * tl.cdiv(keys, CHUNK), live, live,
        keys * 0, keys * 0,
    )  # fmt: skip


@triton.jit
def slot_row(base, chunk, folded, rows, row, HK, hk):
    """The row of a packed row's state after `chunk`: of this chunk, or merged up to `folded`."""
    slot = tl.maximum(chunk - folded, 0)
    return ((base + slot * rows).to(tl.int64) + row) * HK + hk


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPlan:
    """The plan of a list."""

    sizes: tuple[tuple[int], ...]
    """The sizes of the entries, the pieces and the shared chunks, all in int32."""
    layout: MemoryLayout
    """The layout of their memory."""
    of_shared: tuple | None
    """The constants of the kernel that compares tables, if there is one."""
    programs: int
    constants: tuple
    options: dict
    """The options of the kernel that makes the list."""


def list_plan(cache: ShapeCache, plan: AttentionPlan, call: AttentionCall, chunk: int) -> ListPlan:
    """The plan of a call's list; chunk: keys of a chunk."""
    return cache.get_or_create("schedule", chunk, _list_plan, plan, call, chunk)


def schedule(
    cache: ShapeCache, made: ListPlan, lists: Sequence[Tensor], call: AttentionCall
) -> None:
    """Fill lists: flat (entries, pieces, shared chunks)."""
    (entries, pieces, shared), table = lists, call.table
    if table is not None and made.of_shared is not None:
        launch(
            cache, _shared_kernel, (call.batch, 1, 1),
            (shared, table, call.cu_q, call.lens_k, *made.of_shared),
            {"num_warps": 1, "launch_pdl": made.options["launch_pdl"]},
        )  # fmt: skip
    launch(
        cache, _schedule_kernel, (made.programs, 1, 1),
        (entries, pieces, call.cu_q if table is None else table, call.cu_q, call.lens_k, shared,
         *made.constants),
        made.options,
    )  # fmt: skip


def _list_plan(plan: AttentionPlan, call: AttentionCall, chunk: int) -> ListPlan:
    table, window, page = call.table, call.window, call.page or 1
    here, batch = facts(call.cu_q.device), call.batch
    block = max(16, power_of_2(batch))
    together = plan.rows // call.group  # sequences of one query in a block of rows
    share = table is not None and window is None and chunk % page == 0 and min(together, batch) > 1
    programs = min(16, cdiv(plan.most, LISTED))
    sizes = programs * PLANES * (2 * batch + 2), plan.most * FIELDS.value, batch if share else 0
    compared = block * (chunk // page) if share else 0
    compares = 0 < compared <= COMPARED
    stride, of_shared = 0 if table is None else table.stride(0), None
    if share and not compares:
        of_shared = stride, together, chunk, page, here.overlaps
    constants = (
        stride, batch, window or 0, plan.slots, plan.target, call.kv_heads, call.group, plan.rows,
        chunk, call.causal, window is not None, table is not None, page, share, compares, block,
        block.bit_length() + 1, LISTED, here.overlaps,
    )  # fmt: skip
    warps = compared // 256 if compares else block // 128
    options = {"num_warps": max(1, min(8, warps)), "launch_pdl": here.overlaps}
    shapes = tuple((size,) for size in sizes)
    return ListPlan(
        sizes=shapes, layout=layout(shapes, torch.int32), of_shared=of_shared, programs=programs,
        constants=constants, options=options,
    )  # fmt: skip
