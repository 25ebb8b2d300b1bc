"""The merge, from front to back, of the chunks that pieces of work stored (`schedule.py`)."""

import triton
import triton.language as tl

from rlk_kernels.device import facts
from rlk_kernels.launching import ShapeCache, launch, power_of_2
from rlk_kernels.ops.attention.call import AttentionCall, AttentionPlan, Scratch
from rlk_kernels.ops.attention.order import finish, merge
from rlk_kernels.ops.attention.schedule import (
    BASE,
    COUNT,
    FIRST,
    LEADER,
    MEMBERS,
    ROWS,
    TAU,
    last_before,
    lone_sequence,
    ranges_of,
    slot_row,
)
from rlk_kernels.ops.overlap import begin_overlapped

PROGRAMS = 16
"""The most programs of a processor (time only)."""
AHEAD = 8
"""States that are loaded together (time only)."""


@triton.jit
def _merge_slots(
    m, den, acc, part_acc_ptr, part_ml_ptr, base, rows, row, folded, begin, end, hk, cols,
    HK: tl.constexpr, DP: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Merge (m, den, acc) with the chunks begin ... end, where one state has those up to
    `folded`."""
    last = tl.maximum(end, tl.where(end > begin, folded + 1, 0))
    for first in range(tl.maximum(begin, folded), last, AHEAD):
        states = ()
        for i in tl.static_range(AHEAD):  # loaded together; empty after the last
            chunk = first + i + tl.zeros((1,), tl.int32)
            there = chunk < last
            slot = slot_row(base, chunk, folded, rows, row, HK, hk)
            states = states + (  # noqa: RUF005 (Triton has no starred tuples)
                tl.load(part_ml_ptr + slot * 2, mask=there, other=float("-inf")),
                tl.load(part_ml_ptr + slot * 2 + 1, mask=there, other=0.0),
                tl.load(
                    part_acc_ptr + slot[:, None] * DP + cols[None, :], mask=there[:, None],
                    other=0.0,
                ),
            )  # fmt: skip
        for i in tl.static_range(AHEAD):
            m, den, acc = merge(m, den, acc, states[3 * i], states[3 * i + 1], states[3 * i + 2])
    return m, den, acc


@triton.jit(do_not_specialize=["B", "T", "window", "capacity", "target"])
def _merge_kernel(
    plan_ptr, part_acc_ptr, part_ml_ptr, out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, B, T, window,
    capacity, target,
    HK: tl.constexpr, G: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
    CHUNK: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PAGED: tl.constexpr,
    LISTED: tl.constexpr, STEPS: tl.constexpr, AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Merge the packed rows (query * G + head) of the KV heads, one at a time.

    A row is looked up while the attention kernel still runs. The lengths and the list are complete
    before that kernel starts, because it waits for its predecessors before it allows this one to
    start.
    """
    pitch = 2 * B + 2
    if LISTED:
        tau = tl.load(plan_ptr + TAU * pitch)
        total = tl.load(plan_ptr + ROWS * pitch + B) * HK
    else:
        _, lone_queries, _, _, lone_first, _, ranges, lone_length = lone_sequence(
            cu_q_ptr, cu_k_ptr, window, capacity, target, HK, G, BM, CHUNK, CAUSAL, WINDOWED,
            PAGED,
        )  # fmt: skip
        total = tl.where(ranges > 1, lone_queries * G * HK, 0)
    cols = tl.arange(0, DP)
    live = tl.full((1,), True, tl.int1)
    for index in range(tl.program_id(0), total, tl.num_programs(0)):
        hk = index % HK
        packed = index // HK + tl.zeros((1,), tl.int32)
        if LISTED:
            b = tl.sum(last_before(plan_ptr + ROWS * pitch, B, packed, STEPS), 0)
            row = index // HK - tl.load(plan_ptr + ROWS * pitch + b)
        else:
            b = index * 0
            row = index // HK
        q_start = tl.load(cu_q_ptr + b)
        queries = tl.load(cu_q_ptr + b + 1) - q_start
        end = tl.load(cu_k_ptr + b)
        if not PAGED:
            end = tl.load(cu_k_ptr + b + 1) - end
        if CAUSAL:
            end = tl.maximum(row // G + end - queries + 1, 0)
        begin = 0
        if WINDOWED:
            begin = tl.maximum(end - window, 0) // CHUNK
        end = tl.cdiv(end, CHUNK)
        m = tl.full((1,), float("-inf"), tl.float32)
        den = tl.zeros((1,), tl.float32)
        acc = tl.zeros((1, DP), tl.float32)
        if LISTED:
            entry = plan_ptr + 2 * b + 1
            first = tl.load(entry + FIRST * pitch)
            base = tl.load(entry + BASE * pitch)
            _, length = ranges_of(tl.load(entry + COUNT * pitch), tau)
            folded = first + length - 1
            leader = tl.load(plan_ptr + LEADER * pitch + b)
        else:
            base = b
            folded = lone_first + lone_length - 1
        begin_overlapped(OVERLAP)
        if LISTED:  # noqa: SIM102 (these are constants)
            if leader >= 0:
                at = plan_ptr + 2 * leader
                _, length = ranges_of(tl.load(at + COUNT * pitch), tau)
                rows = tl.load(plan_ptr + MEMBERS * pitch + leader) * G
                m, den, acc = _merge_slots(
                    m, den, acc, part_acc_ptr, part_ml_ptr, tl.load(at + BASE * pitch), rows,
                    (b - leader) * G + row, length - 1, 0, first, hk, cols, HK, DP, AHEAD,
                )  # fmt: skip
                folded = first
                begin = first
        m, den, acc = _merge_slots(
            m, den, acc, part_acc_ptr, part_ml_ptr, base, queries * G, row, folded, begin, end, hk,
            cols, HK, DP, AHEAD,
        )  # fmt: skip
        head = hk * G + row % G + tl.zeros((1,), tl.int32)
        token = q_start + row // G + tl.zeros((1,), tl.int32)
        finish(m, den, acc, out_ptr, lse_ptr, token, head, live, cols, HK * G, DIM, T)
    # a program without rows waits too, because the next kernel waits for this one alone
    begin_overlapped(OVERLAP)


def merge_parts(
    cache: ShapeCache, plan: AttentionPlan, call: AttentionCall, scratch: Scratch, chunk: int
) -> None:
    """Fill call.out and lse of the rows whose keys were split."""
    programs, constants, options = cache.get_or_create(
        "merge", chunk, _constants, plan, call, chunk
    )
    launch(
        cache, _merge_kernel, (programs, 1, 1),
        (scratch.entries, scratch.acc, scratch.max_sum, call.out, scratch.lse, call.cu_q,
         call.lens_k, *constants),
        options,
    )  # fmt: skip


def _constants(plan: AttentionPlan, call: AttentionCall, chunk: int) -> tuple[int, tuple, dict]:
    """What calls of one shape share: (programs, constants, options)."""
    (tokens, heads, _), here, batch = call.q.shape, facts(call.q.device), call.batch
    dim = call.v.shape[-1]
    padded = max(16, power_of_2(dim))
    constants = (
        batch, tokens, call.window or 0, plan.slots, plan.target, call.kv_heads, call.group, dim,
        padded, plan.rows, chunk, call.causal, call.window is not None, call.table is not None,
        plan.listed, (batch + 1).bit_length(), AHEAD, here.overlaps,
    )  # fmt: skip
    programs = min(tokens * heads, PROGRAMS * here.processors)
    return programs, constants, {"num_warps": 1, "launch_pdl": here.overlaps}
