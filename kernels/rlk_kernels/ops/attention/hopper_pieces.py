"""`hopper.py` where keys are split: programs that take piece after piece of a list (`schedule.py`).

The warp that copies goes on to the next piece while the other warps end this one. Blocks of 64 rows
keep the sum of their merged chunks in a slot: that leaves room for two programs a processor, whose
copies are what a decode step waits for. Blocks of 128 keep it in shared memory.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rlk_kernels.device import facts
from rlk_kernels.matmul.hopper.pipeline import ROWS
from rlk_kernels.ops.attention.hopper import (
    BLOCK,
    PER_CHUNK,
    _attend,
    _copy_keys,
    buffers,
    descriptors,
)
from rlk_kernels.ops.attention.order import LOG2E, seen_keys
from rlk_kernels.ops.attention.schedule import piece


@gluon.jit
def _blocks(
    one, window, G: gl.constexpr, BM: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr
):  # fmt: skip
    """Of a piece, the blocks of its keys begin ... end, and the end of those that all rows see."""
    _, _, len_q, _, len_k, row, first, limit, only, _, _, _ = one
    seen_begin, shared_end, seen_end = seen_keys(
        row, len_q, len_k, window, G, BM, BLOCK, CAUSAL, WINDOWED
    )
    begin = gl.maximum(seen_begin // BLOCK, first * PER_CHUNK)
    end = gl.minimum(gl.cdiv(seen_end, BLOCK), limit * PER_CHUNK)
    # rows without any key are written too: over one block of which they see nothing
    return begin, gl.maximum(end, begin + only), gl.minimum(shared_end, seen_end) // BLOCK


@gluon.jit
def _attend_pieces(
    given, HK: gl.constexpr, G: gl.constexpr, DIM: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr, RUNNING: gl.constexpr, GROUPS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """`_attend` for a program's pieces, one after another."""
    (
        total, pieces_ptr, q_ptr, out_ptr, lse_ptr, part_acc_ptr, part_ml_ptr, q_smem, merged,
        k_ring, v_ring, k_full, k_empty, v_full, v_empty, scale, window, T, stride_qt, stride_qh,
    ) = given  # fmt: skip
    turn = 0
    one = piece(pieces_ptr, gl.maximum(total - 1 - gl.program_id(0), 0) // HK)
    for i in range(gl.program_id(0), total, gl.num_programs(0)):
        index = total - 1 - i
        following = piece(pieces_ptr, gl.maximum(index - gl.num_programs(0), 0) // HK)
        begin, end, plain_end = _blocks(one, window, G, GROUPS * ROWS, CAUSAL, WINDOWED)
        if begin < end:
            _, q_start, len_q, _, len_k, row, _, _, only, merges, folded, base = one
            own = (
                q_ptr, out_ptr, lse_ptr, part_acc_ptr, part_ml_ptr, q_smem, merged, k_ring, v_ring,
                k_full, k_empty, v_full, v_empty, row, q_start, len_q, len_k, index % HK, begin,
                end, plain_end, only != 0, merges != 0, folded, base, turn, scale, window, T,
                stride_qt, stride_qh,
            )  # fmt: skip
            _attend(own, HK, G, DIM, CAUSAL, WINDOWED, True, RUNNING, GROUP)
        turn += gl.maximum(end - begin, 0)
        one = following


@gluon.jit
def _copy_pieces(
    given, HK: gl.constexpr, G: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr,
    PAGE: gl.constexpr, LENGTH: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """`_copy_keys` for a program's pieces, one after another; the next one is asked for early."""
    (
        total, pieces_ptr, k_desc, v_desc, k_ring, v_ring, k_full, k_empty, v_full, v_empty,
        table_ptr, stride_table, k_head, v_head, k_page, v_page, window,
    ) = given  # fmt: skip
    turn = 0
    one = piece(pieces_ptr, gl.maximum(total - 1 - gl.program_id(0), 0) // HK)
    for i in range(gl.program_id(0), total, gl.num_programs(0)):
        hk = (total - 1 - i) % HK
        following = piece(pieces_ptr, gl.maximum(total - 1 - i - gl.num_programs(0), 0) // HK)
        begin, end, _ = _blocks(one, window, G, GROUPS * ROWS, CAUSAL, WINDOWED)
        b, _, _, k_start, len_k, _, _, _, _, _, _, _ = one
        keys = (
            k_desc, v_desc, k_ring, v_ring, k_full, k_empty, v_full, v_empty,
            table_ptr + b.to(gl.int64) * stride_table, k_start, len_k, hk * k_head, hk * v_head,
            k_page, v_page, begin, end, turn,
        )  # fmt: skip
        _copy_keys(keys, PAGE, LENGTH)
        turn += gl.maximum(end - begin, 0)
        one = following


@gluon.jit(do_not_specialize=["last_entry", "T", "window", "stride_table"])
def _pieces_hopper_kernel(
    plan_ptr, pieces_ptr, q_ptr, k_desc, v_desc, out_ptr, lse_ptr, part_acc_ptr, part_ml_ptr,
    table_ptr, last_entry, T, scale, window, stride_qt, stride_qh, k_head, v_head, k_page, v_page,
    stride_table, HK: gl.constexpr, G: gl.constexpr, DIM: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr, PAGE: gl.constexpr, GROUPS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    q_smem, merged, k_ring, k_full, k_empty, v_ring, v_full, v_empty = buffers(
        q_ptr, DIM, GROUPS, 2, GROUPS, GROUPS == 1
    )
    if OVERLAP:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
    total = gl.load(plan_ptr + last_entry) * HK
    LENGTH: gl.constexpr = k_desc.block_type.shape[0]
    given = (
        total, pieces_ptr, q_ptr, out_ptr, lse_ptr, part_acc_ptr, part_ml_ptr, q_smem, merged,
        k_ring, v_ring, k_full, k_empty, v_full, v_empty, scale, window, T, stride_qt, stride_qh,
    )  # fmt: skip
    keys = (
        total, pieces_ptr, k_desc, v_desc, k_ring, v_ring, k_full, k_empty, v_full, v_empty,
        table_ptr, stride_table, k_head, v_head, k_page, v_page, window,
    )  # fmt: skip
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_attend_pieces, (given, HK, G, DIM, CAUSAL, WINDOWED, True, GROUPS, 0)),
                (_copy_pieces, (keys, HK, G, CAUSAL, WINDOWED, PAGE, LENGTH, GROUPS)),
            ],
            [1], [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_attend_pieces, (given, HK, G, DIM, CAUSAL, WINDOWED, False, GROUPS, 0)),
                (_attend_pieces, (given, HK, G, DIM, CAUSAL, WINDOWED, False, GROUPS, 1)),
                (_copy_pieces, (keys, HK, G, CAUSAL, WINDOWED, PAGE, LENGTH, GROUPS)),
            ],
            [4, 1], [232, 40],
        )  # fmt: skip


def attend_pieces(
    plan: Tensor, pieces: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    part_acc: Tensor, part_ml: Tensor, table: Tensor | None, causal: bool, scale: float,
    window: int | None, groups: int,
) -> None:  # fmt: skip
    """Fill out and lse, or the slots."""
    (tokens, heads, dim), kv_heads = q.shape, k.shape[-2]
    paged, here = table is not None, facts(q.device)
    # decode is bound by memory: every program stays; blocks of 128 rows come and go by length
    programs = pieces.shape[0] * kv_heads
    if groups == 1:
        programs = min(programs, 2 * here.processors)
    _pieces_hopper_kernel[(programs,)](
        plan, pieces, q, *descriptors(k, v, table), out, lse, part_acc, part_ml,
        table if table is not None else plan, plan.shape[1] - 2, tokens, scale * LOG2E, window or 0,
        q.stride(0), q.stride(1), k.stride(-2), v.stride(-2),
        k.stride(0) // k.stride(1) if paged else 0, v.stride(0) // v.stride(1) if paged else 0,
        table.stride(0) if table is not None else 0, kv_heads, heads // kv_heads, dim, causal,
        window is not None, k.shape[1] if paged else 0, groups, here.overlaps, num_warps=4,
        maxnreg=128 if groups == 1 else 168, launch_pdl=here.overlaps,
    )  # fmt: skip
