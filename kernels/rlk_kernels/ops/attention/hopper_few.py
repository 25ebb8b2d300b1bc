"""For `hopper_pieces.py`, of few sequences: pieces without a list, and merged by whoever ends last.

Every program works out for itself what `schedule.py` would list, and keeps it in shared memory: no
kernel runs before the one that attends. None runs behind it: whoever leaves the last state of some
rows merges them, front to back as `merge.py` does, so nothing can change a bit.

Who is last: each piece has a flag beside the states, in the call's own scratch. Its program writes
this launch's number there once its states can be seen by all, then looks at the flags of all pieces
of the same rows. Whoever sees them all merges; two may, and write the same. He who merges clears
them. So nothing is shared with another call or stream, and nothing has to be cleared before: memory
that holds another launch's number, or anything else, holds no flag.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rlk_kernels.matmul.hopper.pipeline import reinterpret, thread_barrier
from rlk_kernels.ops.attention.hopper_narrow import rows_layout
from rlk_kernels.ops.attention.merge import merge_slots
from rlk_kernels.ops.attention.order import finish
from rlk_kernels.ops.attention.schedule import _ranges, piece_of, plan_work

PLANES = gl.constexpr(13)
(
    BEFORE, PREFIX_ITEMS, PREFIX, FIRST, OWN, BASE, OF_PREFIX, MEMBERS, LEADER, Q_START, QUERIES,
    K_START, KEYS,
) = (gl.constexpr(i) for i in range(13))  # fmt: skip
"""By sequence: pieces before it, and what `plan_work` says of it."""
MERGED = gl.constexpr(16)
"""Rows that are merged together (time only)."""
AHEAD = gl.constexpr(4)
"""States of each that are asked for together (time only)."""


@gluon.constexpr_function
def _lanes(block, warps):
    """Of [block]: each warp has all of it."""
    return gl.BlockedLayout([max(block // 32, 1)], [32], [warps], [0])


@gluon.jit
def allocate_planes(BLOCK: gl.constexpr):
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.int32, [PLANES, BLOCK], flat)


@gluon.jit
def _at(planes, field, b, WARPS: gl.constexpr):
    """One number of a plane."""
    BLOCK: gl.constexpr = planes.type.shape[1]
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    numbers = reinterpret(planes, gl.int32, [PLANES * BLOCK, 1], flat)
    return tl.sum(numbers.index(field * BLOCK + b).load(_lanes(1, WARPS)), 0)


@gluon.jit
def _shared_chunks(most, b, table_ptr, stride_table, PAGES: gl.constexpr):
    """Leading chunks, `most` at most, whose blocks are those of the sequence before."""
    STEP: gl.constexpr = min(PAGES, 2048 // b.type.shape[0])
    TILE: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    most = gl.convert_layout(most, gl.SliceLayout(1, TILE))
    at = table_ptr + gl.convert_layout(b, gl.SliceLayout(1, TILE)).to(gl.int64) * stride_table
    page = gl.arange(0, STEP, gl.SliceLayout(0, TILE))
    found = most * 0
    open = most > 0
    while tl.max(open.to(gl.int32), 0) > 0:
        for first in range(0, PAGES, STEP):
            here = (at + found * PAGES + first)[:, None] + page[None, :]
            mine = gl.load(here, mask=open[:, None], other=0)
            theirs = gl.load(here - stride_table, mask=open[:, None], other=0)
            open = open & (tl.max((mine != theirs).to(gl.int32), 1) == 0)
        found += open.to(gl.int32)
        open = open & (found < most)
    return gl.convert_layout(found, b.type.layout)


@gluon.jit
def plan_few(
    planes, cu_q_ptr, lens_ptr, table_ptr, stride_table, B, window, capacity, target,
    HK: gl.constexpr, G: gl.constexpr, BM: gl.constexpr, CHUNK: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Four warps fill the planes; (pieces of one KV head, tau)."""
    BLOCK: gl.constexpr = planes.type.shape[1]
    SHARE: gl.constexpr = PAGE > 0 and not WINDOWED and BM // G > 1 and CHUNK % max(PAGE, 1) == 0
    b = gl.arange(0, BLOCK, _lanes(BLOCK, 4))
    live = b < B
    q_start = gl.load(cu_q_ptr + b, mask=live, other=0)
    queries = gl.load(cu_q_ptr + b + 1, mask=live, other=0) - q_start
    k_start = b * 0
    keys = gl.load(lens_ptr + b, mask=live, other=0)
    if PAGE == 0:
        k_start = keys
        keys = gl.load(lens_ptr + b + 1, mask=live, other=0) - keys
    shared = b * 0
    if SHARE:
        behind = live & (b % (BM // G) != 0)
        mine = table_ptr + b.to(gl.int64) * stride_table
        same = gl.load(mine, mask=behind, other=0) == gl.load(
            mine - stride_table, mask=behind, other=0
        )
        keys_before = gl.load(lens_ptr + b - 1, mask=behind, other=0)
        q_before = gl.load(cu_q_ptr + b - 1, mask=behind, other=0)
        behind = behind & same & (queries == 1) & (q_start - q_before == 1)
        most = gl.where(behind, gl.minimum(keys, keys_before) // CHUNK, 0)
        if tl.max(most, 0) > 0:
            shared = _shared_chunks(most, b, table_ptr, stride_table, CHUNK // PAGE)
    prefix_items, items, prefix, first, own, of_prefix, of_own, members, leader, _, tau = plan_work(
        b, queries, keys, shared, B, window, capacity, target, HK, G, BM, CHUNK, CAUSAL, WINDOWED,
        SHARE, True,
    )  # fmt: skip
    both = prefix_items + items
    rows = of_prefix + of_own
    planes.index(BEFORE).store(tl.cumsum(both, 0) - both)
    planes.index(PREFIX_ITEMS).store(prefix_items)
    planes.index(PREFIX).store(prefix)
    planes.index(FIRST).store(first)
    planes.index(OWN).store(own)
    planes.index(BASE).store(tl.cumsum(rows, 0) - rows)
    planes.index(OF_PREFIX).store(of_prefix)
    planes.index(MEMBERS).store(members)
    planes.index(LEADER).store(leader)
    planes.index(Q_START).store(q_start)
    planes.index(QUERIES).store(queries)
    planes.index(K_START).store(k_start)
    planes.index(KEYS).store(keys)
    thread_barrier()
    return tl.sum(both, 0), tau


@gluon.jit
def few_piece(
    planes, tau, item, BM: gl.constexpr, CHUNK: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """The `piece` that a list would have."""
    BLOCK: gl.constexpr = planes.type.shape[1]
    before = planes.index(BEFORE).load(_lanes(BLOCK, WARPS))
    b = tl.sum((before <= item).to(gl.int32), 0) - 1
    within = item - _at(planes, BEFORE, b, WARPS)
    of_prefix = _at(planes, PREFIX_ITEMS, b, WARPS)
    own = within >= of_prefix
    base = _at(planes, BASE, b, WARPS)
    return piece_of(
        b, own, gl.where(own, within - of_prefix, within),
        gl.where(own, _at(planes, FIRST, b, WARPS), 0),
        gl.where(own, _at(planes, OWN, b, WARPS), _at(planes, PREFIX, b, WARPS)),
        _at(planes, MEMBERS, b, WARPS), _at(planes, LEADER, b, WARPS), tau,
        gl.where(own, base + _at(planes, OF_PREFIX, b, WARPS), base),
        _at(planes, Q_START, b, WARPS), _at(planes, QUERIES, b, WARPS),
        _at(planes, K_START, b, WARPS), _at(planes, KEYS, b, WARPS), BM, CHUNK,
    )  # fmt: skip


@gluon.jit
def _launch_number():
    """Of this launch, and of no other in this context."""
    return gl.inline_asm_elementwise(
        "mov.u64 $0, %gridid;", "=l", [], dtype=gl.int64, is_pure=False, pack=1
    )


@gluon.jit
def sees_all(flags_ptr, item, first, count, hk, HK: gl.constexpr, WARPS: gl.constexpr):
    """Say that the states of piece `item` are there; whether those of all `count`
    pieces from `first` on are."""
    number = _launch_number() + 0x5EED5EED00000000
    flags = flags_ptr.to(gl.int64)
    thread_barrier()  # all have stored
    thread = gl.arange(0, 32 * WARPS, _lanes(32, WARPS))
    gl.inline_asm_elementwise(
        """{
        .reg .pred one; setp.eq.u32 one, $1, 0;
        @one st.release.gpu.global.b64 [$2], $3;
        @one fence.sc.gpu;
        mov.u32 $0, $1;
        }""",
        "=r,r,l,l", [thread, flags + 8 * (item * HK + hk), number], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip
    thread_barrier()  # no flag is read before
    missing = count * 0
    for start in range(0, count, 128):
        one = gl.minimum(start + gl.arange(0, 128, _lanes(32, WARPS)), count - 1)
        found = gl.inline_asm_elementwise(
            "ld.acquire.gpu.global.b64 $0, [$1];", "=l,l", [flags + 8 * ((first + one) * HK + hk)],
            dtype=gl.int64, is_pure=False, pack=1,
        )  # fmt: skip
        missing += tl.sum((found != number).to(gl.int32), 0)
    return missing == 0


@gluon.jit
def _clear_flags(flags_ptr, first, count, hk, HK: gl.constexpr, WARPS: gl.constexpr):
    for start in range(0, count, 128):
        one = start + gl.arange(0, 128, _lanes(32, WARPS))
        at = flags_ptr + 2 * ((first + one) * HK + hk)
        gl.store(at, 0.0, mask=one < count)
        gl.store(at + 1, 0.0, mask=one < count)


@gluon.jit
def merge_rows(
    memory, planes, lone, b, grouped, first_row, hk, tau, window, T, HK: gl.constexpr,
    G: gl.constexpr, DIM: gl.constexpr, CHUNK: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr, LONE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The rows of a group that b leads, or (not grouped) 64 of b from first_row on."""
    out_ptr, lse_ptr, part_acc_ptr, part_ml_ptr = memory
    OUT: gl.constexpr = rows_layout(DIM, WARPS)
    TOGETHER: gl.constexpr = 1 if LONE else max(MERGED.value // G, 1)  # members
    cols = gl.arange(0, DIM, gl.SliceLayout(0, OUT))
    members = b * 0 + 1
    prefix = b * 0
    prefix_base = b * 0
    if not LONE:
        members = gl.where(grouped, _at(planes, MEMBERS, b, WARPS), 1)
        prefix = gl.where(grouped, _at(planes, PREFIX, b, WARPS), 0)
        prefix_base = _at(planes, BASE, b, WARPS)
    for leading in range(0, members, TOGETHER):
        rows = gl.minimum(members - leading, TOGETHER) * G
        if not grouped:
            if LONE:
                rows = gl.minimum(lone[1] * G - first_row, 64)
            else:
                rows = gl.minimum(_at(planes, QUERIES, b, WARPS) * G - first_row, 64)
        for start in range(0, rows, MERGED):
            row = start + gl.arange(0, MERGED, gl.SliceLayout(1, OUT))
            live = row < rows
            member = row * 0
            if grouped:
                member = row // G
            within = first_row + row - member * G
            if LONE:
                q_start, queries, _, keys, first, own, _, length = lone
                base = b * 0
                folded = first + length - 1 + row * 0
            else:
                q_start = row * 0
                queries = row * 0
                keys = row * 0
                first = row * 0
                folded = row * 0
                base = row * 0
                for i in gl.static_range(TOGETHER):
                    here = member == i
                    one = b + gl.minimum(leading + i, members - 1)
                    begins = _at(planes, FIRST, one, WARPS)
                    _, length = _ranges(_at(planes, OWN, one, WARPS), tau)
                    q_start = gl.where(here, _at(planes, Q_START, one, WARPS), q_start)
                    queries = gl.where(here, _at(planes, QUERIES, one, WARPS), queries)
                    keys = gl.where(here, _at(planes, KEYS, one, WARPS), keys)
                    first = gl.where(here, begins, first)
                    folded = gl.where(
                        here, gl.where(grouped, begins, begins + length - 1), folded
                    )
                    base = gl.where(
                        here, _at(planes, BASE, one, WARPS) + _at(planes, OF_PREFIX, one, WARPS), base
                    )
            end = keys + row * 0
            if CAUSAL:
                end = gl.maximum(within // G + keys - queries + 1, 0)
            begin = row * 0
            if WINDOWED:
                begin = gl.maximum(end - window, 0) // CHUNK
            if grouped:
                begin = begin + first
            end = gl.where(live, gl.cdiv(end, CHUNK), 0)
            m = gl.full([MERGED], float("-inf"), gl.float32, gl.SliceLayout(1, OUT))
            den = gl.zeros([MERGED], gl.float32, gl.SliceLayout(1, OUT))
            acc = gl.zeros([MERGED, DIM], gl.float32, OUT)
            if not LONE:
                _, length = _ranges(prefix, tau)
                m, den, acc = merge_slots(
                    m, den, acc, part_acc_ptr, part_ml_ptr, prefix_base, members * G,
                    leading * G + row, length - 1, row * 0, gl.where(live, prefix, 0), hk, cols,
                    HK, DIM, AHEAD,
                )  # fmt: skip
            m, den, acc = merge_slots(
                m, den, acc, part_acc_ptr, part_ml_ptr, base, queries * G, within, folded, begin,
                end, hk, cols, HK, DIM, AHEAD,
            )  # fmt: skip
            finish(
                m, den, acc, out_ptr, lse_ptr, q_start + within // G, hk * G + within % G, live,
                cols, HK * G, DIM, T,
            )  # fmt: skip


@gluon.jit
def end_piece(
    memory, flags_ptr, planes, lone, one, item, items, hk, tau, window, T, HK: gl.constexpr,
    G: gl.constexpr, DIM: gl.constexpr, CHUNK: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr, LONE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """What is left to do behind a piece that is not its rows' only one."""
    b, _, _, _, _, row, begin, _, _, _, _, _ = one
    grouped = b < 0
    if LONE:
        count = lone[6]
        first = row // 64 * count
    else:
        leader = _at(planes, LEADER, b, WARPS)
        grouped = leader >= 0
        if grouped:
            b = leader
            row = row * 0
            first = _at(planes, BEFORE, b, WARPS)
            behind = b + _at(planes, MEMBERS, b, WARPS)
            count = items - first
            if behind < planes.type.shape[1]:
                count = _at(planes, BEFORE, behind, WARPS) - first
        else:
            begins = _at(planes, FIRST, b, WARPS)
            count, length = _ranges(_at(planes, OWN, b, WARPS), tau)
            first = item - (begin - begins) // length
    if sees_all(flags_ptr, item, first, count, hk, HK, WARPS):
        merge_rows(
            memory, planes, lone, b, grouped, row, hk, tau, window, T, HK, G, DIM, CHUNK, CAUSAL,
            WINDOWED, LONE, WARPS,
        )  # fmt: skip
        _clear_flags(flags_ptr, first, count, hk, HK, WARPS)
