"""Rings of pairs of blocks, which the kernels of `hopper/dq.py` and `hopper/dkv.py` share.

Both have a warp that copies (TMA) and two groups of four warps that multiply. While one group turns
scores into weights, the tensor core multiplies for the other.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)

from rlk_kernels.matmul.hopper.pipeline import ROWS, barriers, tensor_map_at, thread_barrier
from rlk_kernels.ops.attention.hopper.steps import as_matrix

BLOCK = gl.constexpr(64)
"""Keys of a step of dq, rows of a step of dk and dv."""
GROUPS = gl.constexpr(2)
"""Groups of four warps, with 64 rows of the result each."""


@gluon.jit
def exp2(x):
    """`gl.exp2` with the same bits, which the compiler does not move. It would move `gl.exp2` after
    the start of the next products, where there are no registers for the operand."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def clear(tile, count):
    """Set the rows after the first `count` to zero, because 0 x NaN is NaN; 16 rows at a time, to
    save registers."""
    DIM: gl.constexpr = tile.type.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    row = gl.arange(0, 16, gl.SliceLayout(1, layout))
    for i in gl.static_range(BLOCK // 16):
        part = tile.slice(i * 16, 16)
        x = part.load(layout)
        thread_barrier()
        part.store(gl.where((row + i * 16 < count)[:, None], x, 0.0))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def new_ring(dtype: gl.constexpr, DEPTH: gl.constexpr, DIM: gl.constexpr):
    """(left blocks, right blocks, barriers of full pairs, barriers of empty pairs)."""
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, DIM], dtype)
    left = gl.allocate_shared_memory(dtype, [DEPTH, BLOCK, DIM], tile)
    right = gl.allocate_shared_memory(dtype, [DEPTH, BLOCK, DIM], tile)
    full, empty = barriers(DEPTH, GROUPS)
    return left, right, full, empty


@gluon.jit
def wait_pair(ring, step):
    """Wait for the blocks of a step and return them."""
    left, right, full, _ = ring
    DEPTH: gl.constexpr = left.type.shape[0]
    mbarrier.wait(full.index(step % DEPTH), step // DEPTH & 1)
    return left.index(step % DEPTH), right.index(step % DEPTH)


@gluon.jit
def free_pair(ring, step):
    left, _, _, empty = ring
    mbarrier.arrive(empty.index(step % left.type.shape[0]))


@gluon.jit
def start_scores(a, b, s, dp, left, right):
    """Start (s, dp) = (a left^T, b right^T)."""
    s = warpgroup_mma(a, left.permute((1, 0)), s, use_acc=False, is_async=True)
    dp = warpgroup_mma(b, right.permute((1, 0)), dp, use_acc=False, is_async=True)
    return s, dp


def can_read(*tensors: Tensor) -> bool:
    """Whether the kernels can read q, k, v and the gradient of the result."""
    return all(
        as_matrix(x.shape, x.stride(), False) is not None and x.data_ptr() % 16 == 0
        for x in tensors
    )


def descriptors(*tensors: Tensor) -> list:
    """Tensor maps of tensors that `can_read` accepts, for 64 rows of a head at a time."""
    return [
        tensor_map_at(x.data_ptr(), x.dtype, size, (x.stride(0), 1), (ROWS.value, x.shape[-1]))
        for x in tensors
        if (size := as_matrix(x.shape, x.stride(), False)) is not None
    ]
