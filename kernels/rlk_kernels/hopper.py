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
def products(
    acc, a_smem, b_smem, full, empty, stage, phase, steps, TRANS_A: gl.constexpr,
    TRANS_B: gl.constexpr, B_ROWS: gl.constexpr, B_COLUMNS: gl.constexpr, SIDE: gl.constexpr,
):  # fmt: skip
    """Four warps: acc plus `steps` products, K from front to back; SIDE: which 64 rows of A."""
    before = 0  # not `stage`: Triton would take the two for one variable
    for step in range(steps):
        mbarrier.wait(full.index(stage), phase)
        a = a_smem.index(2 * stage + SIDE)
        b = b_smem.index(stage * (b_smem.type.shape[0] // DEPTH)).reshape((B_ROWS, B_COLUMNS))
        if TRANS_A:
            a = a.permute((1, 0))
        if TRANS_B:
            b = b.permute((1, 0))
        ahead = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, [ahead])
        # the step before is through: its buffers are free
        mbarrier.arrive(empty.index(before), count=1, pred=step > 0)
        before = stage
        stage += 1
        if stage == DEPTH:
            stage = 0
            phase ^= 1
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(empty.index(before), count=1)
    return acc, stage, phase


@gluon.jit
def halves(x):
    """The left and the right columns of x[R, C]."""
    return gl.split(gl.permute(gl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@gluon.jit
def store_piece(x, desc, smem, row, col):
    """x[R, C] through one buffer."""
    tma.store_wait(0)
    gl.thread_barrier()
    smem.store(x.to(desc.dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(desc, [row, col], smem)


@gluon.jit
def store(x, desc, smem, row, col):
    """x[R, C] in two halves of columns, through one buffer."""
    left, right = halves(x)
    store_piece(left, desc, smem, row, col)
    store_piece(right, desc, smem, row, col + x.shape[1] // 2)
