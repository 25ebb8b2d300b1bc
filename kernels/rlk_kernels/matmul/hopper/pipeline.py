"""What the kernels written for Hopper share (Gluon, which ships with Triton)."""

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
"""Rows of a group of four warps."""
DEPTH = gl.constexpr(4)
"""Steps of K that copies may be ahead of `products`."""

# names that changed between the versions of Triton that these kernels compile with
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
load_elements = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_MEMORY = gl.shared_memory_descriptor
reinterpret = getattr(_MEMORY, "reinterpret", None) or _MEMORY._reinterpret

_GL = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


@functools.cache
def shared_layout(box: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How TMA and the tensor core expect `box` in shared memory."""
    return gl.NVMMASharedLayout.get_default_for(list(box), _GL[dtype])


def described(x: Tensor, box: list[int]) -> TensorDescriptor:
    """A tensor map of x, read or written a `box` at a time."""
    return described_at(x.data_ptr(), x.dtype, x.shape, x.stride(), tuple(box))


def described_at(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...],
    box: tuple[int, ...],
) -> TensorDescriptor:  # fmt: skip
    """`described` of what lies at an address."""
    layout = shared_layout(box, dtype)
    return tensor_map(TensorDescriptor, address, dtype, shape, strides, box, layout)


def lead_steps(k: int, step: int) -> int:
    """Steps of K, at both of its ends, that the left half of a tile goes ahead of the right one."""
    return 2 if k > 4 * step else 0


@gluon.jit
def new_barriers(SLOTS: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers [SLOTS, 1] whose phases end with ARRIVALS arrivals.

    To be followed by `fence_async_shared`, once for all that is set up. Each one must be used: the
    compiler puts tiles where a barrier lies that nobody waits for, and a GPU that takes a program
    off for another process and puts it back writes the barrier into the tile.
    """
    bars = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(bars.index(slot), count=ARRIVALS)
    return bars


@gluon.jit
def barriers(SLOTS: gl.constexpr, READERS: gl.constexpr):
    """(full, empty)[SLOTS, 1]: a buffer is empty once READERS groups of warps have said so."""
    return new_barriers(SLOTS, 1), new_barriers(SLOTS, READERS)


@gluon.jit
def _operands(
    a_smem, b_smem, stage, TRANS_A: gl.constexpr, TRANS_B: gl.constexpr, B_ROWS: gl.constexpr,
    B_COLUMNS: gl.constexpr, SIDE: gl.constexpr,
):  # fmt: skip
    """A[64, K], the rows of SIDE, and B[K, N] of a step."""
    a = a_smem.index(2 * stage + SIDE)
    b = b_smem.index(stage * (b_smem.type.shape[0] // DEPTH)).reshape((B_ROWS, B_COLUMNS))
    if TRANS_A:
        a = a.permute((1, 0))
    if TRANS_B:
        b = b.permute((1, 0))
    return a, b


@gluon.jit
def _next(stage, phase):
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
    """Four warps: acc plus `steps` products, K from front to back; SIDE: which 64 rows of A."""
    before = 0  # not `stage`: Triton would take the two for one variable
    for step in range(steps):
        mbarrier.wait(full.index(stage), phase)
        a, b = _operands(a_smem, b_smem, stage, TRANS_A, TRANS_B, B_ROWS, B_COLUMNS, SIDE)
        ahead = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, [ahead])
        # the step before is through: its buffers are free
        mbarrier.arrive(empty.index(before), count=1, pred=step > 0)
        before = stage
        stage, phase = _next(stage, phase)
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(empty.index(before), count=1)
    return acc, stage, phase


@gluon.jit
def after(stage, phase, STEPS: gl.constexpr):
    """The (stage, phase) STEPS steps later."""
    for _ in gl.static_range(STEPS):
        stage, phase = _next(stage, phase)
    return stage, phase


@gluon.jit
def free(empty, stage, STEPS: gl.constexpr):
    """The buffers of STEPS steps from `stage` may be written again."""
    for step in gl.static_range(STEPS):
        mbarrier.arrive(empty.index((stage + step) % DEPTH), count=1)


@gluon.jit
def start_half(
    half, other, a_smem, b_smem, full, empty, stage, phase, before, PASSED: gl.constexpr,
    RIGHT: gl.constexpr, STEPS: gl.constexpr, TRANS_A: gl.constexpr, TRANS_B: gl.constexpr,
    B_ROWS: gl.constexpr, B_COLUMNS: gl.constexpr, SIDE: gl.constexpr,
):  # fmt: skip
    """(half, other): STEPS products more of one half of the columns started. Once the first of them
    has started, all that was started before is through: `other` is whole, and the buffers of the
    PASSED steps from `before` are free. What is done with `other` next runs beside the rest of
    them, for its instructions go between theirs. Behind them they would come too late: a warp goes
    on from a product only when the tensor core is about to take it (as timed on an H200).
    """
    N: gl.constexpr = (B_ROWS if TRANS_B else B_COLUMNS) // 2
    for step in gl.static_range(STEPS):
        if not RIGHT:  # the left half, which is first, has waited for both
            mbarrier.wait(full.index(stage), phase)
        a, b = _operands(a_smem, b_smem, stage, TRANS_A, TRANS_B, B_ROWS, B_COLUMNS, SIDE)
        half = warpgroup_mma(a, b.slice(N if RIGHT else 0, N, 1), half, is_async=True)
        if step == 0:
            other = warpgroup_mma_wait(1, [other])
            free(empty, before, PASSED)
        stage, phase = _next(stage, phase)
    if STEPS == 0:
        other = warpgroup_mma_wait(0, [other])
        free(empty, before, PASSED)
    return half, other


@gluon.jit
def _step_halves(
    left, right, a_smem, b_smem, full, empty, stage, phase, before, PASSED: gl.constexpr,
    TRANS_A: gl.constexpr, TRANS_B: gl.constexpr, B_ROWS: gl.constexpr, B_COLUMNS: gl.constexpr,
    SIDE: gl.constexpr,
):  # fmt: skip
    """`start_half` of one step of the left half and then of the right one."""
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
    """The rest of `steps` > 2 LEAD products of the left and of the right columns, both started: the
    left half is whole then, the last LEAD steps of the right one are on their way, and `stage` is
    theirs.

    A wait for all but what is on its way waits for nothing. It is there for the compiler, which
    does not see that those sums are not read yet, and would itself wait for all of them.
    """
    before = stage
    stage, phase = after(stage, phase, LEAD)
    left, right = _step_halves(
        left, right, a_smem, b_smem, full, empty, stage, phase, before, LEAD, TRANS_A, TRANS_B,
        B_ROWS, B_COLUMNS, SIDE,
    )  # fmt: skip
    before = stage
    stage, phase = _next(stage, phase)
    for _ in range(steps - 2 * LEAD - 1):
        left, right = _step_halves(
            left, right, a_smem, b_smem, full, empty, stage, phase, before, 1, TRANS_A, TRANS_B,
            B_ROWS, B_COLUMNS, SIDE,
        )  # fmt: skip
        before = stage
        stage, phase = _next(stage, phase)
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
    """x[R, C] through one buffer."""
    tma.store_wait(0)
    thread_barrier()
    smem.store(x.to(desc.dtype))
    fence_async_shared()
    thread_barrier()
    async_store(desc, [row, col], smem)
