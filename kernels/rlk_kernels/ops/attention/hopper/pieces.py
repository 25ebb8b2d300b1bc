"""Programs with the steps of `hopper/steps.py` over pieces of work (`hopper/work.py`).

The warp that copies continues with the next piece while the other warps finish this one. Blocks of
64 rows store the sum of their merged chunks in global memory of their program, which leaves room
for more copies, for which a decode step waits; so do 128 rows of heads of 256. Other blocks of 128
rows store it in shared memory. Few pieces of few rows wait for their products instead, so these are
transposed (`hopper/transposed.py`), and so are all pieces of few rows of heads of 256, whose wide
products have too many sums for the registers. For a batch of one sequence eight warps compute them,
and the pieces are merged here (`hopper/merge_last.py`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rlk_kernels.device import DeviceFacts, facts
from rlk_kernels.launching import ShapeCache, launch
from rlk_kernels.matmul.hopper.pipeline import ROWS, thread_barrier
from rlk_kernels.ops.attention.call import AttentionCall, AttentionPlan, Scratch
from rlk_kernels.ops.attention.hopper.merge_last import end_piece
from rlk_kernels.ops.attention.hopper.steps import (
    CHUNK_KEYS,
    buffers,
    copy_keys,
    descriptors,
    first_scores,
    free_block,
    last_block,
    load_queries,
    next_block,
    wait_block,
    weigh,
    wide_layout,
)
from rlk_kernels.ops.attention.hopper.transposed import attend_chunk, rows_layout
from rlk_kernels.ops.attention.hopper.work import (
    LISTED,
    LONE,
    WHOLE,
    all_work,
    blocks_of,
    next_piece,
    store_state,
    this_program,
)
from rlk_kernels.ops.attention.order import (
    LOG2E,
    block_of_halves,
    block_weights,
    finish,
    merge,
    one_sum,
    sum_levels,
)
from rlk_kernels.ops.attention.schedule import slot_row

DEPTH = {(64, 64): (3, 3), (64, 128): (3, 3), (64, 256): (3, 2)}
"""(rows of a block, head size) -> (blocks of keys, blocks of values) in shared memory, with one
program a processor, if not two of each (time only)."""


@gluon.jit
def _attend_chunk(
    q, rings, begin, end, plain_end, len_k, last, turn, scale, window, DIM: gl.constexpr,
    WINDOWED: gl.constexpr,
):  # fmt: skip
    """(m, den, acc) of the blocks begin ... end, at least one, all of one chunk.

    No scores are computed before their chunk, so that the state between chunks has registers.
    """
    k_ring, v_ring, k_full, k_empty, v_full, v_empty = rings
    BLOCK: gl.constexpr = k_ring.type.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    dtype: gl.constexpr = q.dtype
    s = gl.zeros([ROWS, BLOCK], gl.float32, SCORES)
    acc = gl.zeros([ROWS, DIM], gl.float32, OUT)
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    _, _, _, den = block_weights(s, m, 0.0, sum_levels(BLOCK))
    s = first_scores(q, s, k_ring, k_full, k_empty, turn)
    for j in range(begin, end - 1):
        p, m, den, old = weigh(
            s, m, den, scale, j * BLOCK, last, window, j >= plain_end, dtype, OUT, WINDOWED
        )
        acc = acc * old[:, None]
        here = turn + j - begin
        keys = wait_block(k_ring, k_full, here + 1)
        s, acc = next_block(q, s, p, acc, j == begin, keys, wait_block(v_ring, v_full, here))
        free_block(k_ring, k_empty, here + 1)
        free_block(v_ring, v_empty, here)
    j = end - 1
    p, m, den, old = weigh(
        s, m, den, scale, j * BLOCK, last, window, j >= plain_end, dtype, OUT, WINDOWED
    )
    acc = acc * old[:, None]
    acc = last_block(
        p, acc, j == begin, v_ring, v_full, v_empty, turn + j - begin, len_k - j * BLOCK
    )
    return (
        gl.convert_layout(m, gl.SliceLayout(1, OUT)),
        gl.convert_layout(one_sum(den), gl.SliceLayout(1, OUT)), acc,
    )  # fmt: skip


@gluon.jit
def _operand(like_ptr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """[ROWS, COLUMNS] in shared memory, in the layout of the tensor core."""
    dtype: gl.constexpr = like_ptr.dtype.element_ty
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], dtype)
    return gl.allocate_shared_memory(dtype, [ROWS, COLUMNS], tile)


@gluon.jit
def _attend_piece(
    args, one, hk, begin, end, plain_end, turn, q, weights, HK: gl.constexpr, G: gl.constexpr,
    DIM: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, RUNNING: gl.constexpr,
    GROUPS: gl.constexpr, GROUP: gl.constexpr, NARROW: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Attend with the packed rows q of a piece, over blocks from the `turn`-th of the rings on."""
    (
        _, q_ptr, out_ptr, lse_ptr, part_acc_ptr, part_ml_ptr, running_ptr, _, _, merged, _, _,
        k_ring, v_ring, k_full, k_empty, v_full, v_empty, scale, window, T, stride_qt, stride_qh,
    ) = args  # fmt: skip
    _, q_start, len_q, _, len_k, first_row, _, _, only, merges, folded, base = one
    rings = (k_ring, v_ring, k_full, k_empty, v_full, v_empty)
    R: gl.constexpr = q.type.shape[0]
    BLOCK: gl.constexpr = k_ring.type.shape[1]
    PER_CHUNK: gl.constexpr = CHUNK_KEYS // BLOCK
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    OUT: gl.constexpr = rows_layout(DIM, WARPS) if NARROW else SUMS
    first_row += GROUP * ROWS
    thread_barrier()  # the previous piece has read its queries
    LOAD: gl.constexpr = rows_layout(DIM, WARPS) if WARPS == 8 else wide_layout(DIM)
    load_queries(q_ptr, q, first_row, q_start, len_q, hk, stride_qt, stride_qh, G, LOAD)
    if NARROW:
        thread_barrier()
    else:
        row = first_row + gl.arange(0, R, gl.SliceLayout(1, SCORES))
        last = gl.zeros_like(row) + len_k - 1  # the last key a row sees
        if CAUSAL:
            last = gl.minimum(row // G + len_k - len_q, last)
    cols = gl.arange(0, DIM, gl.SliceLayout(0, OUT))
    row = first_row + gl.arange(0, R, gl.SliceLayout(1, OUT))
    live = row < len_q * G
    m_all = gl.full([R], float("-inf"), gl.float32, gl.SliceLayout(1, OUT))
    den_all = gl.zeros([R], gl.float32, gl.SliceLayout(1, OUT))
    acc_all = gl.zeros([R, DIM], gl.float32, OUT)
    beyond = gl.where(begin < end, gl.cdiv(end, PER_CHUNK), 0)  # rows may see none of these keys
    for chunk in range(begin // PER_CHUNK, beyond):
        first = gl.maximum(begin, chunk * PER_CHUNK)
        limit = gl.minimum(end, (chunk + 1) * PER_CHUNK)
        if NARROW:
            m, den, acc = attend_chunk(
                q, weights, rings, first, limit, plain_end, len_k, first_row, len_q, turn, scale,
                window, G, CAUSAL, WINDOWED, WARPS,
            )  # fmt: skip
        else:
            m, den, acc = _attend_chunk(
                q, rings, first, limit, plain_end, len_k, last, turn, scale, window, DIM, WINDOWED
            )
        turn += limit - first
        if merges != 0:
            # each thread reads what it wrote itself
            mine = running_ptr + (this_program() * GROUPS + GROUP).to(gl.int64) * (ROWS * DIM)
            mine += gl.arange(0, R, gl.SliceLayout(1, OUT)) * DIM
            before = gl.zeros_like(acc)
            if first > begin:
                if RUNNING:
                    at = mine[:, None] + cols[None, :]
                    before = gl.load(at, mask=live[:, None], other=0.0)
                else:
                    before = merged.index(GROUP).load(OUT)
            m_all, den_all, acc_all = merge(m_all, den_all, before, m, den, acc)
            if limit < end:
                if RUNNING:
                    at = mine[:, None] + cols[None, :]
                    gl.store(at, acc_all, mask=live[:, None])
                else:
                    merged.index(GROUP).store(acc_all)
        else:
            slot = slot_row(base, chunk, folded, len_q * G, row, HK, hk)
            store_state(part_acc_ptr, part_ml_ptr, slot, live, cols, m, den, acc, DIM)
            acc_all = acc
    if only != 0:
        finish(
            m_all, den_all, acc_all, out_ptr, lse_ptr, q_start + row // G, hk * G + row % G,
            live, cols, HK * G, DIM, T,
        )  # fmt: skip
    elif (merges != 0) & (begin < end):
        slot = slot_row(base, folded, folded, len_q * G, row, HK, hk)
        store_state(part_acc_ptr, part_ml_ptr, slot, live, cols, m_all, den_all, acc_all, DIM)


@gluon.jit
def _attend_pieces(
    args, HK: gl.constexpr, G: gl.constexpr, DIM: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr, RUNNING: gl.constexpr, GROUPS: gl.constexpr, GROUP: gl.constexpr,
    NARROW: gl.constexpr, IDLE: gl.constexpr, HOW: gl.constexpr, PAGE: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Attend with the packed rows of a program's pieces, one piece after another. Eight warps
    process NARROW rows of each piece. Four warps process 64 rows; if there are at most IDLE pieces,
    those with at most NARROW rows by `hopper/transposed.py`."""
    (
        work, _, out_ptr, lse_ptr, part_acc_ptr, part_ml_ptr, _, flags_ptr, q_smem, _, q_narrow,
        weights, k_ring, _, _, _, _, _, _, window, T, _, _,
    ) = args  # fmt: skip
    q = q_smem.index(GROUP)
    BLOCK: gl.constexpr = k_ring.type.shape[1]
    turn = 0
    total, lone = all_work(
        work, window, HOW, HK, G, GROUPS * ROWS, CHUNK_KEYS, CAUSAL, WINDOWED, PAGE > 0
    )
    for i in range(gl.program_id(0), total, gl.num_programs(0)):
        hk = (total - 1 - i) % HK
        item = (total - 1 - i) // HK
        one = next_piece(work, lone, item, HOW, G, GROUPS * ROWS, CHUNK_KEYS, PAGE > 0)
        begin, end, plain_end = blocks_of(
            one, window, G, GROUPS * ROWS, BLOCK, CHUNK_KEYS, CAUSAL, WINDOWED
        )
        _, _, len_q, _, _, first_row, _, _, only, _, _, _ = one
        if WARPS == 8:
            _attend_piece(
                args, one, hk, begin, end, plain_end, turn, q_narrow, weights, HK, G, DIM, CAUSAL,
                WINDOWED, RUNNING, GROUPS, GROUP, True, WARPS,
            )  # fmt: skip
        elif NARROW > 0:
            if (total <= IDLE) & (len_q * G - first_row <= NARROW):
                _attend_piece(
                    args, one, hk, begin, end, plain_end, turn, q_narrow, weights, HK, G, DIM,
                    CAUSAL, WINDOWED, RUNNING, GROUPS, GROUP, True, WARPS,
                )  # fmt: skip
            else:
                _attend_piece(
                    args, one, hk, begin, end, plain_end, turn, q, weights, HK, G, DIM, CAUSAL,
                    WINDOWED, RUNNING, GROUPS, GROUP, False, WARPS,
                )  # fmt: skip
        else:
            _attend_piece(
                args, one, hk, begin, end, plain_end, turn, q, weights, HK, G, DIM, CAUSAL,
                WINDOWED, RUNNING, GROUPS, GROUP, False, WARPS,
            )  # fmt: skip
        if WARPS == 8 and HOW == LONE:  # noqa: SIM102 (these are constants)
            if only == 0:
                memory = (out_ptr, lse_ptr, part_acc_ptr, part_ml_ptr, flags_ptr)
                end_piece(
                    memory, lone, item, first_row, hk, window, T, HK, G, DIM, CHUNK_KEYS, CAUSAL,
                    WINDOWED, WARPS,
                )  # fmt: skip
        turn += gl.maximum(end - begin, 0)


@gluon.jit
def _copy_pieces(
    args, HK: gl.constexpr, G: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr,
    PAGE: gl.constexpr, LENGTH: gl.constexpr, GROUPS: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """`copy_keys` for a program's pieces, one after another; the next piece is loaded early."""
    (
        work, k_desc, v_desc, k_ring, v_ring, k_full, k_empty, v_full, v_empty,
        table_ptr, stride_table, k_head, v_head, k_page, v_page, window,
    ) = args  # fmt: skip
    turn = 0
    BM: gl.constexpr = GROUPS * ROWS
    total, lone = all_work(work, window, HOW, HK, G, BM, CHUNK_KEYS, CAUSAL, WINDOWED, PAGE > 0)
    item = gl.maximum(total - 1 - gl.program_id(0), 0) // HK
    one = next_piece(work, lone, item, HOW, G, BM, CHUNK_KEYS, PAGE > 0)
    for i in range(gl.program_id(0), total, gl.num_programs(0)):
        hk = (total - 1 - i) % HK
        item = gl.maximum(total - 1 - i - gl.num_programs(0), 0) // HK
        following = next_piece(work, lone, item, HOW, G, BM, CHUNK_KEYS, PAGE > 0)
        begin, end, _ = blocks_of(
            one, window, G, BM, k_ring.type.shape[1], CHUNK_KEYS, CAUSAL, WINDOWED
        )
        b, _, _, k_start, len_k, _, _, _, _, _, _, _ = one
        keys = (
            k_desc, v_desc, k_ring, v_ring, k_full, k_empty, v_full, v_empty,
            table_ptr + b.to(gl.int64) * stride_table, k_start, len_k, hk * k_head, hk * v_head,
            k_page, v_page, begin, end, turn,
        )  # fmt: skip
        copy_keys(keys, PAGE, LENGTH)
        turn += gl.maximum(end - begin, 0)
        one = following


@gluon.jit(do_not_specialize=["B", "T", "capacity", "target", "window", "stride_table"])
def _pieces_hopper_kernel(
    plan_ptr, pieces_ptr, cu_q_ptr, lens_ptr, q_ptr, k_desc, v_desc, out_ptr, lse_ptr,
    part_acc_ptr, part_ml_ptr, running_ptr, flags_ptr, table_ptr, B, T, capacity, target, scale,
    window, stride_qt, stride_qh, k_head, v_head, k_page, v_page, stride_table,
    HK: gl.constexpr, G: gl.constexpr, DIM: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr, PAGE: gl.constexpr, GROUPS: gl.constexpr, K_DEPTH: gl.constexpr,
    V_DEPTH: gl.constexpr, NARROW: gl.constexpr, IDLE: gl.constexpr, HOW: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    RUNNING: gl.constexpr = GROUPS == 1 or DIM == 256
    q_smem, merged, k_ring, k_full, k_empty, v_ring, v_full, v_empty = buffers(
        q_ptr, DIM, GROUPS, K_DEPTH, V_DEPTH, RUNNING
    )
    q_narrow = q_smem
    weights = q_smem
    if NARROW > 0:
        q_narrow = _operand(q_ptr, NARROW, DIM)
        BLOCK: gl.constexpr = block_of_halves(DIM)
        weights = _operand(q_ptr, NARROW, BLOCK)
    if OVERLAP:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
    work = (plan_ptr, pieces_ptr, cu_q_ptr, lens_ptr, B, T, capacity, target)
    LENGTH: gl.constexpr = k_desc.block_type.shape[0]
    args = (
        work, q_ptr, out_ptr, lse_ptr, part_acc_ptr, part_ml_ptr, running_ptr, flags_ptr, q_smem,
        merged, q_narrow, weights, k_ring, v_ring, k_full, k_empty, v_full, v_empty, scale, window,
        T, stride_qt, stride_qh,
    )  # fmt: skip
    keys = (
        work, k_desc, v_desc, k_ring, v_ring, k_full, k_empty, v_full, v_empty,
        table_ptr, stride_table, k_head, v_head, k_page, v_page, window,
    )  # fmt: skip
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_attend_pieces, (
                    args, HK, G, DIM, CAUSAL, WINDOWED, RUNNING, GROUPS, 0, NARROW, IDLE, HOW, PAGE,
                    gl.num_warps(),
                )),
                (_copy_pieces, (keys, HK, G, CAUSAL, WINDOWED, PAGE, LENGTH, GROUPS, HOW)),
            ],
            [1], [40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_attend_pieces, (
                    args, HK, G, DIM, CAUSAL, WINDOWED, RUNNING, GROUPS, 0, 0, IDLE, HOW, PAGE, 4,
                )),
                (_attend_pieces, (
                    args, HK, G, DIM, CAUSAL, WINDOWED, RUNNING, GROUPS, 1, 0, IDLE, HOW, PAGE, 4,
                )),
                (_copy_pieces, (keys, HK, G, CAUSAL, WINDOWED, PAGE, LENGTH, GROUPS, HOW)),
            ],
            [4, 1], [232, 40],
        )  # fmt: skip


def _few_pieces(here: DeviceFacts, dim: int) -> int:
    """The number of pieces up to which those of few rows are transposed (time only): with so few,
    half of the processors are idle, and pieces wait for their products. More pieces wait for
    memory, where narrow ones are up to 10 % slower, but not for heads of 256."""
    return 1 << 30 if dim == 256 else here.processors // 2


def attend_pieces(
    cache: ShapeCache, plan: AttentionPlan, call: AttentionCall, scratch: Scratch
) -> None:
    """Fill call.out and lse, or the slots, by the kernel for Hopper."""
    k, v, table = call.k, call.v, call.table
    programs, counts, strides, constants, options = cache.get_or_create(
        "pieces", None, _constants, plan, call
    )
    maps = cache.get_or_create("maps", (k.data_ptr(), v.data_ptr()), descriptors, k, v, table)
    launch(
        cache, _pieces_hopper_kernel, (programs, 1, 1),
        (scratch.entries, scratch.pieces, call.cu_q, call.lens_k, call.q, *maps, call.out,
         scratch.lse, scratch.acc, scratch.max_sum, scratch.running, scratch.flags,
         table if table is not None else scratch.entries, *counts, call.scale * LOG2E, *strides,
         *constants),
        options,
    )  # fmt: skip


def _constants(plan: AttentionPlan, call: AttentionCall) -> tuple:
    """What calls of one shape share: (programs, numbers, strides, constants, options)."""
    (tokens, _, dim), batch, kv_heads, group = call.q.shape, call.batch, call.kv_heads, call.group
    here, groups = facts(call.q.device), plan.rows // ROWS.value
    # decode is bound by memory and has persistent programs; blocks of 128 rows differ in length
    programs = plan.programs or plan.most * kv_heads
    narrow, few = 0, _few_pieces(here, dim)
    if groups == 1 and (plan.alone or batch * kv_heads <= few):  # there may be as few pieces
        narrow = 8 if (tokens * group if plan.alone else group) <= 8 else 16
    how = (LISTED if plan.listed else LONE) if plan.split else WHOLE
    constants = (
        kv_heads, group, dim, call.causal, call.window is not None, call.page, groups,
        *DEPTH.get((plan.rows, dim), (2, 2)), narrow, few, how.value, here.overlaps,
    )  # fmt: skip
    options = {
        "num_warps": 8 if plan.alone else 4, "maxnreg": 168 if groups > 1 or plan.alone else 208,
        "launch_pdl": here.overlaps,
    }  # fmt: skip
    counts = batch, tokens, plan.slots, plan.target
    return programs, counts, call.hopper_strides(call.q), constants, options
