"""What the kernels written for Hopper share (Gluon, which ships with Triton)."""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

ROWS = gl.constexpr(64)
"""Rows of a group of four warps."""
DEPTH = gl.constexpr(4)
"""Steps of K that copies may be ahead of `products`."""

_GL = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


def shared_layout(box: list[int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How TMA and the tensor core expect `box` in shared memory."""
    return gl.NVMMASharedLayout.get_default_for(box, _GL[dtype])


def described(x: Tensor, box: list[int]) -> TensorDescriptor:
    """A tensor map of x, read or written a `box` at a time."""
    return TensorDescriptor.from_tensor(x, box, shared_layout(box, x.dtype))


def ends(k: int, step: int) -> int:
    """Steps of K, at both of its ends, that the left half of a tile goes ahead of the right one."""
    return 2 if k > 4 * step else 0


@gluon.jit
def barriers(SLOTS: gl.constexpr, READERS: gl.constexpr):
    """(full, empty)[SLOTS, 1]: a buffer is empty once READERS groups of warps have said so.

    To be followed by `fence_async_shared`, once for all that is set up.
    """
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=READERS)
    return full, empty


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
def begun(
    half, a_smem, b_smem, full, stage, phase, FIRST: gl.constexpr, STEPS: gl.constexpr,
    TRANS_A: gl.constexpr, TRANS_B: gl.constexpr, B_ROWS: gl.constexpr, B_COLUMNS: gl.constexpr,
    SIDE: gl.constexpr,
):  # fmt: skip
    """half plus STEPS products of its columns, those from FIRST: begun, and nothing freed."""
    N: gl.constexpr = half.shape[1]
    for _ in gl.static_range(STEPS):
        mbarrier.wait(full.index(stage), phase)
        a, b = _operands(a_smem, b_smem, stage, TRANS_A, TRANS_B, B_ROWS, B_COLUMNS, SIDE)
        half = warpgroup_mma(a, b.slice(FIRST, N, 1), half, is_async=True)
        stage, phase = _next(stage, phase)
    return half


@gluon.jit
def passed(empty, stage, phase, STEPS: gl.constexpr):
    """Frees the buffers of STEPS steps: the (stage, phase) behind them."""
    for _ in gl.static_range(STEPS):
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = _next(stage, phase)
    return stage, phase


@gluon.jit
def products_of_halves(
    left, right, a_smem, b_smem, full, empty, stage, phase, steps, ENDS: gl.constexpr,
    TRANS_A: gl.constexpr, TRANS_B: gl.constexpr, B_ROWS: gl.constexpr, B_COLUMNS: gl.constexpr,
    SIDE: gl.constexpr,
):  # fmt: skip
    """The rest of `steps` products of the left and of the right columns, both begun: the left half
    is whole then, the last ENDS steps of the right one are on their way, and `stage` is theirs."""
    left, right = warpgroup_mma_wait(0, [left, right])
    stage, phase = passed(empty, stage, phase, ENDS)
    N: gl.constexpr = left.shape[1]
    before = 0
    for step in range(steps - 2 * ENDS):
        mbarrier.wait(full.index(stage), phase)
        a, b = _operands(a_smem, b_smem, stage, TRANS_A, TRANS_B, B_ROWS, B_COLUMNS, SIDE)
        ahead = warpgroup_mma(a, b.slice(0, N, 1), left, is_async=True)
        ahead_too = warpgroup_mma(a, b.slice(N, N, 1), right, is_async=True)
        left, right = warpgroup_mma_wait(2, [ahead, ahead_too])
        mbarrier.arrive(empty.index(before), count=1, pred=step > 0)
        before = stage
        stage, phase = _next(stage, phase)
    left, right = warpgroup_mma_wait(0, [left, right])
    mbarrier.arrive(empty.index(before), count=1)
    ahead = begun(
        left, a_smem, b_smem, full, stage, phase, 0, ENDS, TRANS_A, TRANS_B, B_ROWS, B_COLUMNS, SIDE
    )
    ahead_too = begun(
        right, a_smem, b_smem, full, stage, phase, N, ENDS, TRANS_A, TRANS_B, B_ROWS, B_COLUMNS,
        SIDE,
    )  # fmt: skip
    left, right = warpgroup_mma_wait(ENDS, [ahead, ahead_too])
    return left, right, stage, phase


@gluon.jit
def store_piece(x, desc, smem, row, col):
    """x[R, C] through one buffer."""
    tma.store_wait(0)
    gl.thread_barrier()
    smem.store(x.to(desc.dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(desc, [row, col], smem)
