"""The chunks of `hopper/pieces.py` for blocks of few packed rows: transposed products in the order
of `order.py`.

The tensor core needs 64 rows of a product's first operand, and a decode step has 4. Here keys and
values are that operand, and rows are columns: scores [keys, rows], sums [head size, rows]. So a
block costs as much as reading its keys and values from shared memory, and does not compute 16 times
the necessary exponentials. The scores of the next block are computed beside the weights of this
one.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rlk_kernels.matmul.hopper.pipeline import thread_barrier
from rlk_kernels.ops.attention.hopper.steps import clear_rows, free_block, wait_block
from rlk_kernels.ops.attention.order import add, sum_levels


@triton.jit
def _weights(s, m, scale):
    """The first three results of `order.block_weights`, for scores s[keys, rows]."""
    top = tl.maximum(m, tl.max(s, 0) * scale)
    safe = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(tl.fma(s, scale, (0.0 - safe)[None, :]))
    return p, top, tl.exp2(m - safe)


@triton.jit
def _eight_sums(p, LEVELS: tl.constexpr):
    """`order.eight_sums` of p[8 * 2**LEVELS, rows]."""
    for level in tl.static_range(LEVELS):
        p = tl.reduce(tl.reshape(p, (2, 4 << (LEVELS - level), p.shape[1])), 0, add)
    return p


@triton.jit
def _one_sum(p):
    """`order.one_sum` of p[8, rows]."""
    for level in tl.static_range(3):
        p = tl.reduce(tl.reshape(p, (2, 4 >> level, p.shape[1])), 0, add)
    return tl.reshape(p, (p.shape[1],))


@gluon.constexpr_function
def rows_layout(dim, warps):
    """The layout of [rows, dim] in which a warp has whole rows."""
    lanes = min(dim // 4, 32)
    return gl.BlockedLayout([1, 4], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit
def _start_scores(q, k_ring, k_full, turn, LAYOUT: gl.constexpr):
    """Start the scores [keys, rows] of the `turn`-th block."""
    R: gl.constexpr = q.type.shape[0]
    BLOCK: gl.constexpr = k_ring.type.shape[1]
    keys = wait_block(k_ring, k_full, turn)
    s = gl.zeros([BLOCK, R], gl.float32, LAYOUT)
    return warpgroup_mma(keys, q.permute((1, 0)), s, use_acc=False, is_async=True)


@gluon.jit
def _start_sums(p, acc, weights, fresh, v_ring, v_full, turn, count, WARPS: gl.constexpr):
    """Start the sums with the values of the `turn`-th block; its first `count` are the
    sequence's."""
    weights.permute((1, 0)).store(p.to(weights.dtype))
    fence_async_shared()
    values = wait_block(v_ring, v_full, turn)
    if count < values.type.shape[0]:
        clear_rows(values, count, WARPS)
    thread_barrier()
    return warpgroup_mma(
        values.permute((1, 0)), weights.permute((1, 0)), acc, use_acc=not fresh, is_async=True
    )


@gluon.jit
def _masked(s, first, last, window, masked, WINDOWED: gl.constexpr):
    if masked:
        key = first + gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))
        visible = key[:, None] <= last[None, :]
        if WINDOWED:
            visible &= key[:, None] > (last - window)[None, :]
        s = gl.where(visible, s, float("-inf"))
    return s


@gluon.jit
def _add_sums(p, den, old, SUMS: gl.constexpr):
    """den[8, rows] plus the eight sums of p[keys, rows], with a row's keys j mod 8 in one
    thread."""
    LEVELS: gl.constexpr = sum_levels(p.shape[0])
    sums = _eight_sums(gl.convert_layout(p, SUMS), LEVELS)
    old = gl.convert_layout(old, gl.SliceLayout(0, sums.type.layout))
    return gl.fma(gl.convert_layout(den, sums.type.layout), old[None, :], sums)


@gluon.jit
def attend_chunk(
    q, weights, rings, begin, end, plain_end, len_k, first_row, len_q, turn, scale, window,
    G: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """(m, den, acc) of the blocks begin ... end, at least one, all of one chunk; in `rows_layout`.

    q[rows, DIM] and weights[rows, BLOCK] are in shared memory; q is visible to all threads.
    """
    k_ring, v_ring, k_full, k_empty, v_full, v_empty = rings
    R: gl.constexpr = q.type.shape[0]
    DIM: gl.constexpr = q.type.shape[1]
    BLOCK: gl.constexpr = k_ring.type.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, R, 16])
    SUMS: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, WARPS], [1, 0])
    row = first_row + gl.arange(0, R, gl.SliceLayout(0, LAYOUT))
    last = gl.zeros_like(row) + len_k - 1  # the last key a row sees
    if CAUSAL:
        last = gl.minimum(row // G + len_k - len_q, last)
    acc = gl.zeros([DIM, R], gl.float32, LAYOUT)
    m = gl.full([R], float("-inf"), gl.float32, gl.SliceLayout(0, LAYOUT))
    den = gl.zeros([8, R], gl.float32, SUMS)
    s = _start_scores(q, k_ring, k_full, turn, LAYOUT)
    s = warpgroup_mma_wait(0, [s])
    free_block(k_ring, k_empty, turn)
    for j in range(begin, end - 1):
        scores = _start_scores(q, k_ring, k_full, turn + 1, LAYOUT)
        s = _masked(s, j * BLOCK, last, window, j >= plain_end, WINDOWED)
        p, m, old = _weights(s, m, scale)
        s = warpgroup_mma_wait(0, [scores])
        free_block(k_ring, k_empty, turn + 1)
        sums = _start_sums(
            p, acc * old[None, :], weights, j == begin, v_ring, v_full, turn, BLOCK, WARPS
        )  # fmt: skip
        den = gl.convert_layout(_add_sums(p, den, old, SUMS), SUMS)
        acc = warpgroup_mma_wait(0, [sums])
        free_block(v_ring, v_empty, turn)
        turn += 1
    j = end - 1
    s = _masked(s, j * BLOCK, last, window, j >= plain_end, WINDOWED)
    p, m, old = _weights(s, m, scale)
    sums = _start_sums(
        p, acc * old[None, :], weights, j == begin, v_ring, v_full, turn, len_k - j * BLOCK,
        WARPS,
    )  # fmt: skip
    den = _add_sums(p, den, old, SUMS)
    acc = warpgroup_mma_wait(0, [sums])
    free_block(v_ring, v_empty, turn)
    OUT: gl.constexpr = rows_layout(DIM, WARPS)
    return (
        gl.convert_layout(m, gl.SliceLayout(1, OUT)),
        gl.convert_layout(_one_sum(den), gl.SliceLayout(1, OUT)),
        gl.convert_layout(gl.permute(acc, (1, 0)), OUT),
    )
