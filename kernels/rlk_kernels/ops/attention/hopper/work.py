"""The pieces of work of a program in Gluon, and where the program stores what is not merged yet.

Pieces come from a list (`schedule.py`) if keys are split, or from the lengths alone for one
sequence; they are whole blocks of rows if no table has room for two chunks of keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rlk_kernels.ops.attention.order import visible_keys
from rlk_kernels.ops.attention.schedule import (
    lone_piece,
    lone_sequence,
    piece,
    whole_piece,
)

LISTED, LONE, WHOLE = (gl.constexpr(i) for i in range(3))
"""The source of pieces: a list, the lengths of the only sequence, or the rows alone, which have at
most one chunk of keys."""


@gluon.jit
def all_work(
    work, window, HOW: gl.constexpr, HK: gl.constexpr, G: gl.constexpr, BM: gl.constexpr,
    CHUNK: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """(pieces of all KV heads, the `lone_sequence` for `lone_piece`)."""
    plan_ptr, _, cu_q_ptr, lens_ptr, B, T, capacity, target = work
    lone = (0, 0, 0, 0, 0, 0, 0, 0)
    if HOW == LONE:
        lone = lone_sequence(
            cu_q_ptr, lens_ptr, window, capacity, target, HK, G, BM, CHUNK, CAUSAL, WINDOWED,
            PAGED,
        )  # fmt: skip
        total = gl.cdiv(lone[1] * G, BM) * lone[6]
    elif HOW == WHOLE:
        total = T * G // BM + B
    else:
        total = gl.load(plan_ptr + 2 * B)
    return total * HK, lone


@gluon.jit
def next_piece(
    work, lone, item, HOW: gl.constexpr, G: gl.constexpr, BM: gl.constexpr, CHUNK: gl.constexpr,
    PAGED: gl.constexpr,
):  # fmt: skip
    _, pieces_ptr, cu_q_ptr, lens_ptr, B, _, _, _ = work
    if HOW == LONE:
        entry = lone_piece(lone, item, G, BM)
    elif HOW == WHOLE:
        entry = whole_piece(cu_q_ptr, lens_ptr, item, B, G, BM, CHUNK, PAGED)
    else:
        entry = piece(pieces_ptr, item)
    return entry


@gluon.jit
def blocks_of(
    one, window, G: gl.constexpr, BM: gl.constexpr, BLOCK: gl.constexpr, CHUNK: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """(begin and end of the blocks of a piece's keys, end of the blocks that all rows see)."""
    PER_CHUNK: gl.constexpr = CHUNK // BLOCK
    _, _, len_q, _, len_k, row, first, limit, only, _, _, _ = one
    visible_begin, shared_end, visible_end = visible_keys(
        row, len_q, len_k, window, G, BM, BLOCK, CAUSAL, WINDOWED
    )
    begin = gl.maximum(visible_begin // BLOCK, first * PER_CHUNK)
    end = gl.minimum(gl.cdiv(visible_end, BLOCK), limit * PER_CHUNK)
    # rows without keys are written too, after one block of which they see nothing
    return begin, gl.maximum(end, begin + only), gl.minimum(shared_end, visible_end) // BLOCK


@gluon.jit
def store_state(part_acc_ptr, part_ml_ptr, slot, live, cols, m, den, acc, DIM: gl.constexpr):
    gl.store(part_ml_ptr + slot * 2, m, mask=live)
    gl.store(part_ml_ptr + slot * 2 + 1, den, mask=live)
    gl.store((part_acc_ptr + slot * DIM)[:, None] + cols[None, :], acc, mask=live[:, None])


@gluon.jit
def this_program():
    """`gl.program_id(0)`, which the compiler does not move: addresses that it computes before the
    blocks of keys have no registers."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %ctaid.x;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
