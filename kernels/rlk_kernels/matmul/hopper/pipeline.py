"""What the Gluon kernels for Hopper share; Gluon ships with Triton."""

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rlk_kernels.launching import tensor_map

ROWS = gl.constexpr(64)
"""Rows of one group of four warps."""
DEPTH = gl.constexpr(4)
"""The most steps of K by which copies are ahead of `products`."""

# names that differ between the versions of Triton that compile these kernels
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
load_elements = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_MEMORY = gl.shared_memory_descriptor
reinterpret = getattr(_MEMORY, "reinterpret", None) or _MEMORY._reinterpret

_GL = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


@functools.cache
def shared_layout(box: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """The layout of `box` in shared memory that TMA and the tensor core expect."""
    return gl.NVMMASharedLayout.get_default_for(list(box), _GL[dtype])


def tensor_map_of(x: Tensor, box: list[int]) -> TensorDescriptor:
    """A tensor map that reads or writes x in boxes."""
    return tensor_map_at(x.data_ptr(), x.dtype, x.shape, x.stride(), tuple(box))


def tensor_map_at(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...],
    box: tuple[int, ...],
) -> TensorDescriptor:  # fmt: skip
    """`tensor_map_of` for memory at an address."""
    layout = shared_layout(box, dtype)
    return tensor_map(TensorDescriptor, address, dtype, shape, strides, box, layout)


def lead_steps(k: int, step: int) -> int:
    """Steps of K by which the left half of a tile is ahead of the right half, at both ends of K."""
    return 2 if k > 4 * step else 0


@gluon.jit
def new_barriers(SLOTS: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers [SLOTS, 1] whose phases end with ARRIVALS arrivals.

    Call `fence_async_shared` once after all barriers are set up. Every barrier must be used: the
    compiler places tiles in the memory of a barrier that nobody waits for, and a GPU that suspends
    a program for another process and resumes it writes the barrier into the tile.
    """
    bars = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(bars.index(slot), count=ARRIVALS)
    return bars


@gluon.jit
def barriers(SLOTS: gl.constexpr, READERS: gl.constexpr):
    """(full, empty)[SLOTS, 1]; a buffer is empty once READERS groups of warps have released it."""
    return new_barriers(SLOTS, 1), new_barriers(SLOTS, READERS)


@gluon.jit
def _operands(
    a_smem, b_smem, stage, TRANS_A: gl.constexpr, TRANS_B: gl.constexpr, B_ROWS: gl.constexpr,
    B_COLUMNS: gl.constexpr, SIDE: gl.constexpr,
):  # fmt: skip
    """The rows of SIDE, A[64, K], and B[K, N] of a step."""
    a = a_smem.index(2 * stage + SIDE)
    b = b_smem.index(stage * (b_smem.type.shape[0] // DEPTH)).reshape((B_ROWS, B_COLUMNS))
    if TRANS_A:
        a = a.permute((1, 0))
    if TRANS_B:
        b = b.permute((1, 0))
    return a, b


@gluon.jit
def _next_stage(stage, phase):
    stage += 1
    if stage == DEPTH:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def products(
    acc, a_smem, b_smem, full, empty, stage, phase, steps, TRANS_A: gl.constexpr,
    TRANS_B: gl.constexpr, B_ROWS: gl.constexpr, B_COLUMNS: gl.constexpr, SIDE: gl.constexpr,
):  # fmt: skip
    """acc plus `steps` products by four warps, with K from front to back; SIDE: which rows of A."""
    before = 0  # not `stage`, which Triton would treat as the same variable
    for step in range(steps):
        mbarrier.wait(full.index(stage), phase)
        a, b = _operands(a_smem, b_smem, stage, TRANS_A, TRANS_B, B_ROWS, B_COLUMNS, SIDE)
        ahead = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, [ahead])
        # the previous step has ended, so its buffers are free
        mbarrier.arrive(empty.index(before), count=1, pred=step > 0)
        before = stage
        stage, phase = _next_stage(stage, phase)
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(empty.index(before), count=1)
    return acc, stage, phase


@gluon.jit
def advance(stage, phase, STEPS: gl.constexpr):
    """(stage, phase) after STEPS more steps."""
    for _ in gl.static_range(STEPS):
        stage, phase = _next_stage(stage, phase)
    return stage, phase


@gluon.jit
def release(empty, stage, STEPS: gl.constexpr):
    """Release the buffers of STEPS steps, from `stage` on."""
    for step in gl.static_range(STEPS):
        mbarrier.arrive(empty.index((stage + step) % DEPTH), count=1)


@gluon.jit
def start_half(
    half, other, a_smem, b_smem, full, empty, stage, phase, before, PASSED: gl.constexpr,
    RIGHT: gl.constexpr, STEPS: gl.constexpr, TRANS_A: gl.constexpr, TRANS_B: gl.constexpr,
    B_ROWS: gl.constexpr, B_COLUMNS: gl.constexpr, SIDE: gl.constexpr,
):  # fmt: skip
    """Start STEPS more products of one half of the columns; returns (half, other).

    Once the first product has started, all products started earlier have ended: `other` is
    complete, and the buffers of the PASSED steps from `before` are free. The next work on `other`
    runs beside the remaining products, because its instructions stand between theirs. After them
    it would run too late: a warp continues after a product only when the tensor core is about to
    take that product (timed on an H200).
    """
    N: gl.constexpr = (B_ROWS if TRANS_B else B_COLUMNS) // 2
    for step in gl.static_range(STEPS):
        if not RIGHT:  # the left half comes first and waits for both
            mbarrier.wait(full.index(stage), phase)
        a, b = _operands(a_smem, b_smem, stage, TRANS_A, TRANS_B, B_ROWS, B_COLUMNS, SIDE)
        half = warpgroup_mma(a, b.slice(N if RIGHT else 0, N, 1), half, is_async=True)
        if step == 0:
            other = warpgroup_mma_wait(1, [other])
            release(empty, before, PASSED)
        stage, phase = _next_stage(stage, phase)
    if STEPS == 0:
        other = warpgroup_mma_wait(0, [other])
        release(empty, before, PASSED)
    return half, other


@gluon.jit
def _step_halves(
    left, right, a_smem, b_smem, full, empty, stage, phase, before, PASSED: gl.constexpr,
    TRANS_A: gl.constexpr, TRANS_B: gl.constexpr, B_ROWS: gl.constexpr, B_COLUMNS: gl.constexpr,
    SIDE: gl.constexpr,
):  # fmt: skip
    """`start_half` for one step of the left half, then of the right half."""
    left, right = start_half(
        left, right, a_smem, b_smem, full, empty, stage, phase, before, PASSED, False, 1, TRANS_A,
        TRANS_B, B_ROWS, B_COLUMNS, SIDE,
    )  # fmt: skip
    N: gl.constexpr = right.shape[1]
    a, b = _operands(a_smem, b_smem, stage, TRANS_A, TRANS_B, B_ROWS, B_COLUMNS, SIDE)
    right = warpgroup_mma(a, b.slice(N, N, 1), right, is_async=True)
    left, right = warpgroup_mma_wait(2, [left, right])
    return left, right


@gluon.jit
def multiply_halves(
    left, right, a_smem, b_smem, full, empty, stage, phase, steps, LEAD: gl.constexpr,
    TRANS_A: gl.constexpr, TRANS_B: gl.constexpr, B_ROWS: gl.constexpr, B_COLUMNS: gl.constexpr,
    SIDE: gl.constexpr,
):  # fmt: skip
    """The remaining products of `steps` > 2 LEAD steps, for left and right columns that are both
    started. On return the left half is complete, the last LEAD steps of the right half are in
    flight, and `stage` is their first.

    A wait that leaves as many products in flight as there are waits for nothing. It is for the
    compiler, which does not see that the sums are not read yet and would wait for all of them.
    """
    before = stage
    stage, phase = advance(stage, phase, LEAD)
    left, right = _step_halves(
        left, right, a_smem, b_smem, full, empty, stage, phase, before, LEAD, TRANS_A, TRANS_B,
        B_ROWS, B_COLUMNS, SIDE,
    )  # fmt: skip
    before = stage
    stage, phase = _next_stage(stage, phase)
    for _ in range(steps - 2 * LEAD - 1):
        left, right = _step_halves(
            left, right, a_smem, b_smem, full, empty, stage, phase, before, 1, TRANS_A, TRANS_B,
            B_ROWS, B_COLUMNS, SIDE,
        )  # fmt: skip
        before = stage
        stage, phase = _next_stage(stage, phase)
    left, right = start_half(
        left, right, a_smem, b_smem, full, empty, stage, phase, before, 1, False, LEAD, TRANS_A,
        TRANS_B, B_ROWS, B_COLUMNS, SIDE,
    )  # fmt: skip
    right, left = start_half(
        right, left, a_smem, b_smem, full, empty, stage, phase, before, 0, True, LEAD, TRANS_A,
        TRANS_B, B_ROWS, B_COLUMNS, SIDE,
    )  # fmt: skip
    right = warpgroup_mma_wait(LEAD, [right])
    return left, right, stage, phase


@gluon.jit
def store_block(x, desc, smem, row, col):
    """Store x[R, C] by way of one buffer in shared memory."""
    tma.store_wait(0)
    thread_barrier()
    smem.store(x.to(desc.dtype))
    fence_async_shared()
    thread_barrier()
    async_store(desc, [row, col], smem)
