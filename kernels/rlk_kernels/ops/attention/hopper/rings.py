"""What the kernels of `hopper/dq.py` and `hopper/dkv.py` share: rings of pairs of blocks.

Both have a warp that copies (TMA) and two groups of four warps that multiply. While one of these
turns scores into weights, the tensor core works for the other.
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
from rlk_kernels.ops.attention.hopper.steps import _matrix

BLOCK = gl.constexpr(64)
"""Keys of a step of dq, rows of a step of dk and dv."""
GROUPS = gl.constexpr(2)
"""Groups of four warps, of 64 rows of the result each."""


@gluon.jit
def exp2(x):
    """As `gl.exp2`, and to the bit; but the compiler leaves it where it is. Behind the start of the
    next products, where it would have it, there are no registers for its operand."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def clear(tile, count):
    """Zeros behind the first `count` rows: weights of 0 hide no NaN. 16 rows at a time, for want of
    registers."""
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
    """Pairs of blocks, and the barriers that say which are full and which are empty."""
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, DIM], dtype)
    left = gl.allocate_shared_memory(dtype, [DEPTH, BLOCK, DIM], tile)
    right = gl.allocate_shared_memory(dtype, [DEPTH, BLOCK, DIM], tile)
    full, empty = barriers(DEPTH, GROUPS)
    return left, right, full, empty


@gluon.jit
def pair(ring, step):
    """The blocks of a step, once they are there."""
    left, right, full, _ = ring
    DEPTH: gl.constexpr = left.type.shape[0]
    mbarrier.wait(full.index(step % DEPTH), step // DEPTH & 1)
    return left.index(step % DEPTH), right.index(step % DEPTH)


@gluon.jit
def free(ring, step):
    left, _, _, empty = ring
    mbarrier.arrive(empty.index(step % left.type.shape[0]))


@gluon.jit
def start_scores(a, b, s, dp, left, right):
    """Started: (s, dp) = (a left^T, b right^T)."""
    s = warpgroup_mma(a, left.permute((1, 0)), s, use_acc=False, is_async=True)
    dp = warpgroup_mma(b, right.permute((1, 0)), dp, use_acc=False, is_async=True)
    return s, dp


def reads(*tensors: Tensor) -> bool:
    """Whether these kernels can read q, k, v and the gradient of the result."""
    return all(
        _matrix(x.shape, x.stride(), False) is not None and x.data_ptr() % 16 == 0 for x in tensors
    )


def descriptors(*tensors: Tensor) -> list:
    """Tensor maps, 64 rows of a head at a time, of what `reads` accepts."""
    return [
        tensor_map_at(x.data_ptr(), x.dtype, size, (x.stride(0), 1), (ROWS.value, x.shape[-1]))
        for x in tensors
        if (size := _matrix(x.shape, x.stride(), False)) is not None
    ]
