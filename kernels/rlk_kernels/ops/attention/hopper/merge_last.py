"""The merge of `hopper/pieces.py` for a batch of one sequence: the program that ends last merges
the pieces from front to back as `merge.py` does. So no kernel runs after the attention kernel, and
no bit can change.

The last program is found by flags: each piece has a flag beside the states, in the call's own
scratch. A program writes a number of this launch to its flag once its states are visible to all,
and then reads the flags of all pieces of the same rows. A program that sees all flags set merges;
if two programs do, both write the same. A program that merges clears the flags, because the replay
of a graph has the number of its first run. So no memory is shared with another call or stream, and
none is cleared beforehand: any other number counts as a flag that is not set.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rlk_kernels.matmul.hopper.pipeline import ROWS, thread_barrier
from rlk_kernels.ops.attention.hopper.transposed import rows_layout
from rlk_kernels.ops.attention.order import finish, merge
from rlk_kernels.ops.attention.schedule import slot_row

TOGETHER = gl.constexpr(16)
"""Rows that are merged together (time only)."""
AHEAD = gl.constexpr(4)
"""States of each row that are loaded together (time only)."""
MARK = gl.constexpr(0x5EED5EED00000000)
"""The mark that is added to the number of a launch, which is small."""


@gluon.constexpr_function
def _threads(warps):
    """The layout of [32 * warps] numbers: one number per thread."""
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.jit
def _launch_number():
    """A number of this launch, which is the same for all replays of a graph's node."""
    return MARK + gl.inline_asm_elementwise(
        "mov.u64 $0, %gridid;", "=l", [], dtype=gl.int64, is_pure=False, pack=1
    )


@gluon.jit
def _sees_all(flags_ptr, item, first, count, hk, HK: gl.constexpr, WARPS: gl.constexpr):
    """Set the flag of piece `item`; returns whether all `count` pieces from `first` on have set
    theirs."""
    number = _launch_number()
    flags = flags_ptr.to(gl.int64)
    thread = gl.arange(0, 32 * WARPS, _threads(WARPS))
    thread_barrier()  # all threads have stored their states
    # the fence is between writing this flag and reading the others: of two programs, one sees both
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
    thread_barrier()
    missing = count * 0
    for start in range(0, count, 32 * WARPS):
        one = gl.minimum(start + thread, count - 1)
        numbers = gl.inline_asm_elementwise(
            "ld.acquire.gpu.global.b64 $0, [$1];", "=l,l", [flags + 8 * ((first + one) * HK + hk)],
            dtype=gl.int64, is_pure=False, pack=1,
        )  # fmt: skip
        missing += tl.sum((numbers != number).to(gl.int32), 0)
    return missing == 0


@gluon.jit
def _clear_flags(flags_ptr, first, count, hk, HK: gl.constexpr, WARPS: gl.constexpr):
    for start in range(0, count, 32 * WARPS):
        one = start + gl.arange(0, 32 * WARPS, _threads(WARPS))
        at = flags_ptr + 2 * ((first + one) * HK + hk)  # of two float32
        gl.store(at, 0.0, mask=one < count)
        gl.store(at + 1, 0.0, mask=one < count)


@triton.jit
def _merge_slots(
    m, den, acc, part_acc_ptr, part_ml_ptr, base, rows, row, folded, begin, end, hk, cols,
    HK: tl.constexpr, DP: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """`merge._merge_slots` for several rows: (m[R], den[R], acc[R, DP]) and the chunks begin[R] ...
    end[R] of each row[R]. The function there is shorter, for its single row."""
    start = tl.maximum(begin, folded)
    last = tl.maximum(end, tl.where(end > begin, folded + 1, 0))
    lowest = tl.min(tl.where(last > start, start, 1 << 30), 0)
    for first in range(lowest, tl.max(last, 0), AHEAD):
        states = ()
        for i in tl.static_range(AHEAD):  # loaded together; empty after the last
            chunk = row * 0 + first + i
            there = (chunk >= start) & (chunk < last)
            slot = slot_row(base, chunk, folded, rows, row, HK, hk)
            states = states + (  # noqa: RUF005 (Triton has no starred tuples)
                tl.load(part_ml_ptr + slot * 2, mask=there, other=float("-inf")),
                tl.load(part_ml_ptr + slot * 2 + 1, mask=there, other=0.0),
                tl.load(
                    (part_acc_ptr + slot * DP)[:, None] + cols[None, :], mask=there[:, None],
                    other=0.0,
                ),
            )  # fmt: skip
        for i in tl.static_range(AHEAD):
            m, den, acc = merge(m, den, acc, states[3 * i], states[3 * i + 1], states[3 * i + 2])
    return m, den, acc


@gluon.jit
def end_piece(
    memory, lone, item, first_row, hk, window, T, HK: gl.constexpr, G: gl.constexpr,
    DIM: gl.constexpr, CHUNK: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Merge 64 rows after piece `item` of a `lone_sequence` if it is their last piece to end."""
    out_ptr, lse_ptr, part_acc_ptr, part_ml_ptr, flags_ptr = memory
    q_start, queries, _, keys, first, _, ranges, length = lone
    OUT: gl.constexpr = rows_layout(DIM, WARPS)
    cols = gl.arange(0, DIM, gl.SliceLayout(0, OUT))
    first_item = first_row // ROWS * ranges
    if _sees_all(flags_ptr, item, first_item, ranges, hk, HK, WARPS):
        rows = gl.minimum(queries * G, first_row + ROWS)
        for start in range(first_row, rows, TOGETHER):
            row = start + gl.arange(0, TOGETHER, gl.SliceLayout(1, OUT))
            live = row < rows
            end = keys + row * 0
            if CAUSAL:
                end = gl.maximum(row // G + keys - queries + 1, 0)
            begin = row * 0
            if WINDOWED:
                begin = gl.maximum(end - window, 0) // CHUNK
            end = gl.where(live, gl.cdiv(end, CHUNK), 0)
            m = gl.full([TOGETHER], float("-inf"), gl.float32, gl.SliceLayout(1, OUT))
            den = gl.zeros([TOGETHER], gl.float32, gl.SliceLayout(1, OUT))
            acc = gl.zeros([TOGETHER, DIM], gl.float32, OUT)
            m, den, acc = _merge_slots(
                m, den, acc, part_acc_ptr, part_ml_ptr, 0, queries * G, row, first + length - 1,
                begin, end, hk, cols, HK, DIM, AHEAD,
            )  # fmt: skip
            finish(
                m, den, acc, out_ptr, lse_ptr, q_start + row // G, hk * G + row % G, live, cols,
                HK * G, DIM, T,
            )  # fmt: skip
        _clear_flags(flags_ptr, first_item, ranges, hk, HK, WARPS)
