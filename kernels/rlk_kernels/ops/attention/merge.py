"""Merging the chunks that pieces of work left behind (`schedule.py`), front to back."""

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
    _ranges,
    last_before,
    lone_sequence,
    slot_row,
)

PROGRAMS = 16
"""Programs a processor at most (time only)."""
AHEAD = 8
"""States that are asked for together (time only)."""


@triton.jit
def _merge_slots(
    m, den, acc, part_acc_ptr, part_ml_ptr, base, rows, row, folded, begin, end, hk, cols,
    HK: tl.constexpr, DP: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """(m, den, acc) and the chunks begin ... end, those up to `folded` in one state."""
    last = tl.maximum(end, tl.where(end > begin, folded + 1, 0))
    for first in range(tl.maximum(begin, folded), last, AHEAD):
        states = ()
        for i in tl.static_range(AHEAD):  # asked for together; behind the last an empty one
            chunk = first + i + tl.zeros((1,), tl.int32)
            there = chunk < last
            place = slot_row(base, chunk, folded, rows, row, HK, hk)
            states = states + (  # noqa: RUF005 (Triton has no starred tuples)
                tl.load(part_ml_ptr + place * 2, mask=there, other=float("-inf")),
                tl.load(part_ml_ptr + place * 2 + 1, mask=there, other=0.0),
                tl.load(
                    part_acc_ptr + place[:, None] * DP + cols[None, :], mask=there[:, None],
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
    LISTED: tl.constexpr, RUNNING: tl.constexpr, STEPS: tl.constexpr, AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """A packed row (query * G + head) of one KV head at a time, of those that have to be merged.

    A row is looked up while the kernel that attends still runs: lengths and list were there before
    that began, which waits for all before it and lets this one begin only then.
    """
    pitch = 2 * B + 2
    if LISTED:
        tau = tl.load(plan_ptr + TAU * pitch)
        total = tl.load(plan_ptr + ROWS * pitch + B) * HK
    else:
        _, lone_queries, _, _, lone_first, _, ranges, lone_length = lone_sequence(
            cu_q_ptr, cu_k_ptr, window, capacity, target, HK, G, BM, CHUNK, CAUSAL, WINDOWED,
            PAGED, RUNNING,
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
            _, length = _ranges(tl.load(entry + COUNT * pitch), tau)
            folded = first + length - 1
            leader = tl.load(plan_ptr + LEADER * pitch + b)
        else:
            base = b
            folded = lone_first + lone_length - 1
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        if LISTED:  # noqa: SIM102 (these are constants)
            if leader >= 0:
                at = plan_ptr + 2 * leader
                _, length = _ranges(tl.load(at + COUNT * pitch), tau)
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
    if OVERLAP:  # a program without a row waits too: the next kernel waits for this one alone
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def merge_parts(
    cache: ShapeCache, plan: AttentionPlan, call: AttentionCall, scratch: Scratch, chunk: int
) -> None:
    """call.out and lse of the rows whose keys were split."""
    programs, constants, options = cache.get_or_create("merge", chunk, _fixed, plan, call, chunk)
    launch(
        cache, _merge_kernel, (programs, 1, 1),
        (scratch.entries, scratch.acc, scratch.max_sum, call.out, scratch.lse, call.cu_q,
         call.lens_k, *constants),
        options,
    )  # fmt: skip


def _fixed(plan: AttentionPlan, call: AttentionCall, chunk: int) -> tuple[int, tuple, dict]:
    """What calls of one shape have in common: (programs, constants, options)."""
    (tokens, heads, dim), here, batch = call.q.shape, facts(call.q.device), call.batch
    padded = max(16, power_of_2(dim))
    constants = (
        batch, tokens, call.window or 0, plan.slots, plan.target, call.kv_heads, call.group, dim,
        padded, plan.rows, chunk, call.causal, call.window is not None, call.table is not None,
        plan.listed, int(plan.running), (batch + 1).bit_length(), AHEAD, here.overlaps,
    )  # fmt: skip
    programs = min(tokens * heads, PROGRAMS * here.processors)
    return programs, constants, {"num_warps": 1, "launch_pdl": here.overlaps}
