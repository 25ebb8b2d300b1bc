# ruff: noqa: RUF005 (Gluon has no starred tuples)
"""Persistent programs with the steps of `steps.py` over all keys of blocks of rows.

The warp that copies also takes the next block of rows, the longest first, and announces its
position. It continues with the keys of that block while the other warps finish theirs. The sum of
merged chunks is in shared memory, and is read and written once a chunk.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rlk_kernels import memory
from rlk_kernels.device import facts
from rlk_kernels.launching import ShapeCache, launch
from rlk_kernels.matmul.hopper.pipeline import (
    ROWS,
    barriers,
    load_elements,
    reinterpret,
    thread_barrier,
)
from rlk_kernels.ops.attention.call import AttentionCall
from rlk_kernels.ops.attention.hopper.steps import (
    CHUNK_KEYS,
    buffers,
    copy_keys,
    descriptors,
    first_scores,
    free_block,
    last_block,
    mask_scores,
    merge_chunk,
    wait_block,
    weigh,
    wide_layout,
    write_rows,
)
from rlk_kernels.ops.attention.order import (
    LOG2E,
    block_of_halves,
    block_weights,
    eight_sums,
    find_sequence,
    result,
    sum_levels,
    visible_keys,
    weights_below,
)

REGISTERS = {1: 168, 2: 168, 3: 128}
"""Groups of four warps -> the initial registers of a thread, before the groups take registers from
the warp that copies."""
SLOTS = gl.constexpr(2)
"""The most blocks of rows that the copying warp announces ahead."""


@gluon.jit
def _announce(slots, full, empty, turn, at):
    """Announce the eight numbers `at` of the `turn`-th block of rows of a program."""
    mbarrier.wait(empty.index(turn % SLOTS), (turn // SLOTS & 1) ^ 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    index = gl.arange(0, 8, layout)
    x = gl.zeros_like(index)
    for i in gl.static_range(8):
        x = gl.where(index == i, at[i], x)
    slots.index(turn % SLOTS).store(x)
    thread_barrier()
    mbarrier.arrive(full.index(turn % SLOTS))


@gluon.jit
def _receive(slots, full, empty, turn):
    """Receive the eight numbers of the `turn`-th block of rows."""
    mbarrier.wait(full.index(turn % SLOTS), turn // SLOTS & 1)
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    index = gl.arange(0, 8, layout)
    x = slots.index(turn % SLOTS).load(layout)
    thread_barrier()
    mbarrier.arrive(empty.index(turn % SLOTS))
    at = ()
    for i in gl.static_range(8):
        at = at + (gl.sum(gl.where(index == i, x, 0), 0),)
    return at


@gluon.jit
def _close_chunk(m_all, den_all, merged, some, m, den, acc):
    """`merge_chunk`, with its sum stored for the next chunk."""
    m_all, den_all, total = merge_chunk(m_all, den_all, merged, some, m, den, acc)
    merged.store(total)
    return m_all, den_all


@gluon.jit
def _quarters(x, LAYOUT: gl.constexpr):
    """The four quarters of the columns of x, in order; registers do not leave their thread."""
    HALF: gl.constexpr = x.shape[1] // 2
    a, b = gl.split(gl.permute(gl.reshape(x, (ROWS, 2, HALF)), (0, 2, 1)))
    parts = ()
    for half in gl.static_range(2):
        x = (a, b)[half]
        c, d = gl.split(gl.permute(gl.reshape(x, (ROWS, 2, HALF // 2)), (0, 2, 1)))
        parts = parts + (gl.convert_layout(c, LAYOUT), gl.convert_layout(d, LAYOUT))
    return parts


@gluon.jit
def _attend_block(q, s, m, top, den, acc, scale, keys, values):
    """(scores of the next block, den, acc) after a block of scores with the known maximum `top`.

    The values of a quarter are multiplied while the weights of the next quarter are computed.
    """
    OUT: gl.constexpr = acc.type.layout
    WIDTH: gl.constexpr = s.shape[1] // 4
    PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    m = gl.convert_layout(m, gl.SliceLayout(1, PART))
    top = gl.convert_layout(top, gl.SliceLayout(1, PART))
    parts = _quarters(s, PART)
    p = ()
    weights = ()
    for i in gl.static_range(4):
        part, _, old, _ = weights_below(parts[i], m, top, scale, 0)
        operand = gl.convert_layout(part.to(q.dtype), gl.DotOperandLayout(0, OUT, 2))
        if i == 0:
            acc = acc * gl.convert_layout(old, gl.SliceLayout(1, OUT))[:, None]
        acc = warpgroup_mma(operand, values.slice(i * WIDTH, WIDTH), acc, is_async=True)
        p = p + (part,)
        weights = weights + (operand,)
    s = warpgroup_mma(q, keys.permute((1, 0)), s, use_acc=False, is_async=True)
    # the order of `eight_sums` of all
    sums = eight_sums((p[0] + p[2]) + (p[1] + p[3]), sum_levels(WIDTH))
    sums = gl.convert_layout(sums, den.type.layout)
    den = gl.fma(den, gl.convert_layout(old, gl.SliceLayout(1, den.type.layout))[:, None], sums)
    ended = warpgroup_mma_wait(0, [s, acc, weights[0], weights[1], weights[2], weights[3]])
    return ended[0], den, ended[1]


@gluon.jit
def _attend_rows(
    q, merged, rings, turn, last, begin, end, plain_end, len_k, scale, window, DIM: gl.constexpr,
    WINDOWED: gl.constexpr,
):  # fmt: skip
    """(m, den, acc) of 64 rows over the blocks begin ... end of keys, at least one."""
    k_ring, v_ring, k_full, k_empty, v_full, v_empty = rings
    BLOCK: gl.constexpr = k_ring.type.shape[1]
    PER_CHUNK: gl.constexpr = CHUNK_KEYS // BLOCK
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    dtype: gl.constexpr = q.dtype
    s = gl.zeros([ROWS, BLOCK], gl.float32, SCORES)
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    _, _, _, den = block_weights(s, m, 0.0, sum_levels(BLOCK))
    acc = gl.zeros([ROWS, DIM], gl.float32, OUT)
    m_all = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, OUT))
    den_all = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, OUT))
    s = first_scores(q, s, k_ring, k_full, k_empty, turn)
    last_chunk = (end - 1) // PER_CHUNK
    some = False
    for chunk in range(begin // PER_CHUNK, last_chunk + 1):
        m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        den = gl.zeros_like(den)
        acc = gl.zeros([ROWS, DIM], gl.float32, OUT)
        first = gl.maximum(begin, chunk * PER_CHUNK)
        for j in range(first, gl.minimum(end - 1, (chunk + 1) * PER_CHUNK)):
            # both are complete by now; a wait further down would divide the step
            keys = wait_block(k_ring, k_full, turn + 1)
            values = wait_block(v_ring, v_full, turn)
            s, top = mask_scores(s, m, scale, j * BLOCK, last, window, j >= plain_end, WINDOWED)
            s, den, acc = _attend_block(q, s, m, top, den, acc, scale, keys, values)
            m = top
            free_block(k_ring, k_empty, turn + 1)
            free_block(v_ring, v_empty, turn)
            turn += 1
        if chunk < last_chunk:
            m_all, den_all = _close_chunk(m_all, den_all, merged, some, m, den, acc)
            some = True
    j = end - 1
    p, m, den, old = weigh(
        s, m, den, scale, j * BLOCK, last, window, j >= plain_end, dtype, OUT, WINDOWED
    )
    acc = acc * old[:, None]
    acc = last_block(p, acc, False, v_ring, v_full, v_empty, turn, len_k - j * BLOCK)
    return merge_chunk(m_all, den_all, merged, some, m, den, acc)


@gluon.jit
def _start_load(q_ptr, q, first_row, q_start, len_q, hk, stride_qt, stride_qh, G: gl.constexpr):
    """Start to copy packed rows into q[rows, DIM], with the last row again after the sequence.

    The copy bypasses registers: the wait for loaded registers would come before the stores that
    hide the load.
    """
    DIM: gl.constexpr = q.type.shape[1]
    LOAD: gl.constexpr = wide_layout(DIM)
    row = gl.minimum(first_row + gl.arange(0, ROWS, gl.SliceLayout(1, LOAD)), len_q * G - 1)
    at = (q_start + row // G).to(gl.int64) * stride_qt + (hk * G + row % G) * stride_qh
    at = at[:, None] + gl.arange(0, DIM, gl.SliceLayout(0, LOAD))[None, :]
    load_elements(q, q_ptr + at)
    async_copy.commit_group()


@gluon.jit
def _wait_load():
    async_copy.wait_group(0)
    fence_async_shared()
    thread_barrier()


@gluon.jit
def _attend(
    args, HK: gl.constexpr, G: gl.constexpr, DIM: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Attend with 64 packed rows of each block of a program, by four warps."""
    (
        q_ptr, out_ptr, lse_ptr, q_smem, merged, rings, slots, full, empty, scale, window, T,
        stride_qt, stride_qh,
    ) = args  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_of_halves(DIM), 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    q = q_smem.index(GROUP)
    merged = merged.index(GROUP)
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DIM], q.dtype)
    staging = reinterpret(merged, q.dtype, [2 * ROWS, DIM], tile).slice(0, ROWS)
    first_row, q_start, len_q, len_k, hk, begin, end, plain_end = _receive(slots, full, empty, 0)
    first_row += GROUP * ROWS
    _start_load(q_ptr, q, first_row, q_start, len_q, hk, stride_qt, stride_qh, G)
    turn = 0
    done = 0
    while end > 0:
        _wait_load()
        row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
        last = gl.zeros_like(row) + len_k - 1  # the last key a row sees
        if CAUSAL:
            last = gl.minimum(row // G + len_k - len_q, last)
        m, den, acc = _attend_rows(
            q, merged, rings, turn, last, begin, end, plain_end, len_k, scale, window, DIM, WINDOWED
        )
        turn += end - begin
        out, lse = result(m, den, acc)
        row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
        at = (hk * G + row % G).to(gl.int64) * T + q_start + row // G
        gl.store(lse_ptr + at, lse, mask=row < len_q * G)
        rows = (first_row, q_start, len_q, hk)
        done += 1
        first_row, q_start, len_q, len_k, hk, begin, end, plain_end = _receive(
            slots, full, empty, done
        )
        first_row += GROUP * ROWS
        _start_load(q_ptr, q, first_row, q_start, len_q, hk, stride_qt, stride_qh, G)
        write_rows(out, staging, out_ptr, *rows, G, HK * G)
    _wait_load()


@gluon.jit
def _earlier_requests(counter):
    """The number of earlier requests of all programs. It assigns rows to programs, which changes no
    bit."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    before = gl.atomic_add(counter + lane * 0, lane * 0 + 1, mask=lane == 0, sem="relaxed")
    return gl.sum(gl.where(lane == 0, before, 0), 0)


@gluon.jit
def _copy_rows(
    args, HK: gl.constexpr, G: gl.constexpr, BM: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr, PAGE: gl.constexpr, LENGTH: gl.constexpr, MORE: gl.constexpr,
):  # fmt: skip
    """Announce a program's blocks of rows and copy all of their keys, with one warp."""
    (
        k_desc, v_desc, k_ring, v_ring, k_full, k_empty, v_full, v_empty, slots, full, empty,
        counter, cu_q_ptr, cu_k_ptr, table_ptr, B, blocks, window, k_head, v_head, k_page, v_page,
        stride_table,
    ) = args  # fmt: skip
    BLOCK: gl.constexpr = k_ring.type.shape[1]
    turn = 0
    done = 0
    item = gl.program_id(0)
    while item < blocks * HK:
        following = blocks * HK
        if MORE:
            following = _earlier_requests(counter) + gl.num_programs(0)
        hk = item % HK
        b, q_start, len_q, first_row = find_sequence(cu_q_ptr, blocks - 1 - item // HK, B, G, BM)
        if first_row < len_q * G:
            k_start = 0
            len_k = gl.load(cu_k_ptr + b)
            if PAGE == 0:
                k_start = len_k
                len_k = gl.load(cu_k_ptr + b + 1) - k_start
            visible_begin, shared_end, visible_end = visible_keys(
                first_row, len_q, len_k, window, G, BM, BLOCK, CAUSAL, WINDOWED
            )
            begin = visible_begin // BLOCK
            end = gl.maximum(gl.cdiv(visible_end, BLOCK), begin + 1)
            plain_end = gl.minimum(shared_end, visible_end) // BLOCK
            at = (first_row, q_start, len_q, len_k, hk, begin, end, plain_end)
            _announce(slots, full, empty, done, at)
            keys = (
                k_desc, v_desc, k_ring, v_ring, k_full, k_empty, v_full, v_empty,
                table_ptr + b.to(gl.int64) * stride_table, k_start, len_k, hk * k_head,
                hk * v_head, k_page, v_page, begin, end, turn,
            )  # fmt: skip
            copy_keys(keys, PAGE, LENGTH)
            turn += end - begin
            done += 1
        item = following
    # the end: no keys, and one row to load
    _announce(slots, full, empty, done, (0, 0, 1, 0, 0, 0, 0, 0))


@gluon.jit(do_not_specialize=["B", "T", "blocks", "window", "stride_table"])
def _attention_hopper_kernel(
    counter, q_ptr, k_desc, v_desc, out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, table_ptr, scale, B, T,
    blocks, window, stride_qt, stride_qh, k_head, v_head, k_page, v_page, stride_table,
    HK: gl.constexpr, G: gl.constexpr, DIM: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr, PAGE: gl.constexpr, GROUPS: gl.constexpr, MORE: gl.constexpr,
):  # fmt: skip
    """MORE: there are more blocks of rows than programs."""
    DEPTH: gl.constexpr = 3 if DIM == 64 else 2  # as many as there is room for (time only)
    q_smem, merged, k_ring, k_full, k_empty, v_ring, v_full, v_empty = buffers(
        q_ptr, DIM, GROUPS, DEPTH, DEPTH, False
    )
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    slots = gl.allocate_shared_memory(gl.int32, [SLOTS, 8], flat)
    full, empty = barriers(SLOTS, GROUPS)
    fence_async_shared()
    rings = (k_ring, v_ring, k_full, k_empty, v_full, v_empty)
    args = (
        q_ptr, out_ptr, lse_ptr, q_smem, merged, rings, slots, full, empty, scale, window, T,
        stride_qt, stride_qh,
    )  # fmt: skip
    keys = (
        k_desc, v_desc, k_ring, v_ring, k_full, k_empty, v_full, v_empty, slots, full, empty,
        counter, cu_q_ptr, cu_k_ptr, table_ptr, B, blocks, window, k_head, v_head, k_page, v_page,
        stride_table,
    )  # fmt: skip
    LENGTH: gl.constexpr = k_desc.block_type.shape[0]
    BM: gl.constexpr = GROUPS * ROWS
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_attend, (args, HK, G, DIM, CAUSAL, WINDOWED, 0)),
                (_copy_rows, (keys, HK, G, BM, CAUSAL, WINDOWED, PAGE, LENGTH, MORE)),
            ],
            [1], [40],
        )  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (_attend, (args, HK, G, DIM, CAUSAL, WINDOWED, 0)),
                (_attend, (args, HK, G, DIM, CAUSAL, WINDOWED, 1)),
                (_copy_rows, (keys, HK, G, BM, CAUSAL, WINDOWED, PAGE, LENGTH, MORE)),
            ],
            [4, 1], [232, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_attend, (args, HK, G, DIM, CAUSAL, WINDOWED, 0)),
                (_attend, (args, HK, G, DIM, CAUSAL, WINDOWED, 1)),
                (_attend, (args, HK, G, DIM, CAUSAL, WINDOWED, 2)),
                (_copy_rows, (keys, HK, G, BM, CAUSAL, WINDOWED, PAGE, LENGTH, MORE)),
            ],
            [4, 4, 1], [160, 160, 24],
        )  # fmt: skip


def attend_hopper(cache: ShapeCache, rows: int, call: AttentionCall, lse: Tensor) -> None:
    """Fill call.out and lse without splitting keys, `rows` packed rows at a time, for k and v that
    `can_read` accepts."""
    q, k, v, table = call.q, call.k, call.v, call.table
    if q.data_ptr() % 16 or any(stride % 16 for stride in q.stride()[:2]):
        q = q.clone(memory_format=torch.contiguous_format)  # for copies of 16 bytes
    programs, more, numbers, constants, options = cache.get_or_create(
        "blocks", q.stride(), _constants, rows, q, call
    )
    maps = cache.get_or_create("maps", (k.data_ptr(), v.data_ptr()), descriptors, k, v, table)
    counter = call.cu_q
    if more:
        counter = memory.empty((1,), torch.int32, q.device).zero_()
    launch(
        cache, _attention_hopper_kernel, (programs, 1, 1),
        (counter, q, *maps, call.out, lse, call.cu_q, call.lens_k,
         table if table is not None else call.cu_q, call.scale * LOG2E, *numbers, *constants),
        options,
    )  # fmt: skip


def _constants(rows: int, q: Tensor, call: AttentionCall) -> tuple:
    """What calls of one shape share: (programs, whether there are more blocks than programs,
    numbers, constants, options)."""
    (tokens, _, dim), batch, kv_heads, group = q.shape, call.batch, call.kv_heads, call.group
    groups = rows // ROWS.value
    blocks = tokens * group // rows + batch
    programs = min(blocks * kv_heads, facts(q.device).processors)
    more = blocks * kv_heads > programs
    numbers = batch, tokens, blocks, *call.hopper_strides(q)
    constants = (
        kv_heads, group, dim, call.causal, call.window is not None, call.page, groups, more
    )  # fmt: skip
    return programs, more, numbers, constants, {"num_warps": 4, "maxnreg": REGISTERS[groups]}
