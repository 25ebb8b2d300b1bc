"""dq of `backward.py` on Hopper: the same order and bits with another schedule.

A group of four warps has 64 packed rows of q, of the result's gradient and of the weights in
registers; only keys and values pass through shared memory. It starts the products with the keys of
this block and the scores of the next block at the same time.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rlk_kernels.launching import ShapeCache, launch
from rlk_kernels.matmul.hopper.pipeline import ROWS, async_load, thread_barrier
from rlk_kernels.ops.attention.call import AttentionCall
from rlk_kernels.ops.attention.hopper.rings import (
    BLOCK,
    GROUPS,
    clear,
    descriptors,
    exp2,
    free_pair,
    new_ring,
    start_scores,
    wait_pair,
)
from rlk_kernels.ops.attention.hopper.steps import load_queries, wide_layout, write_rows
from rlk_kernels.ops.attention.order import LOG2E, find_sequence, visible_keys

DEPTH = 4
"""The most pairs of blocks by which copies are ahead of products."""


@gluon.jit
def _first_scores(a, b, ring):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    s = gl.zeros([ROWS, BLOCK], gl.float32, LAYOUT)
    dp = gl.zeros([ROWS, BLOCK], gl.float32, LAYOUT)
    left, right = wait_pair(ring, 0)
    s, dp = start_scores(a, b, s, dp, left, right)
    s, dp = warpgroup_mma_wait(0, [s, dp])
    return s, dp


@gluon.jit
def _copy_pairs(args):
    """Copy the keys and values of `steps` blocks, with one warp."""
    k_desc, v_desc, ring, first, k_column, v_column, steps = args
    left, right, full, empty = ring
    DEPTH: gl.constexpr = left.type.shape[0]
    for step in range(steps):
        slot = step % DEPTH
        mbarrier.wait(empty.index(slot), (step // DEPTH & 1) ^ 1)
        mbarrier.expect(full.index(slot), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        key = first + step * BLOCK
        async_load(k_desc, [key, k_column], full.index(slot), left.index(slot))
        async_load(v_desc, [key, v_column], full.index(slot), right.index(slot))


@gluon.jit
def _row_weights(
    s, dp, lse, delta, first, last, window, scale, masked, WINDOWED: gl.constexpr,
):  # fmt: skip
    """ds[rows, keys]."""
    if masked:
        key = first + gl.arange(0, BLOCK, gl.SliceLayout(0, s.type.layout))
        visible = key[None, :] <= last[:, None]
        if WINDOWED:
            visible &= key[None, :] > (last - window)[:, None]
        s = gl.where(visible, s, float("-inf"))
        dp = gl.where(visible, dp, 0.0)
    p = exp2(gl.fma(s, scale, (0.0 - lse)[:, None]))
    return p * (dp - delta[:, None])


@gluon.jit
def _queries_gradients(
    args, HK: gl.constexpr, G: gl.constexpr, DIM: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """dq of 64 packed rows over `steps` blocks of keys from block `begin` on, by four warps."""
    (
        q_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, q_smem, do_smem, ring, first_row, q_start, len_q,
        len_k, hk, begin, steps, plain_end, scale_log2, scale, window, T, stride_qt, stride_qh,
    ) = args  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    first_row += GROUP * ROWS
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    live = row < len_q * G
    at = (hk * G + row % G).to(gl.int64) * T + q_start + row // G
    lse = gl.load(lse_ptr + at, mask=live, other=0.0)
    lse = gl.where(lse == float("-inf"), 0.0, lse * 1.4426950408889634)
    delta = gl.load(delta_ptr + at, mask=live, other=0.0)
    last = gl.zeros_like(row) + len_k - 1  # the last key a row sees
    if CAUSAL:
        last = gl.minimum(row // G + len_k - len_q, last)
    q_smem = q_smem.index(GROUP)
    do_smem = do_smem.index(GROUP)
    LOAD: gl.constexpr = wide_layout(DIM)
    load_queries(q_ptr, q_smem, first_row, q_start, len_q, hk, stride_qt, stride_qh, G, LOAD)
    load_queries(do_ptr, do_smem, first_row, q_start, len_q, hk, HK * G * DIM, DIM, G, LOAD)
    thread_barrier()
    q = q_smem.load(LEFT)
    do = do_smem.load(LEFT)

    dq = gl.zeros([ROWS, DIM], gl.float32, OUT)
    s, dp = _first_scores(q, do, ring)
    group_steps = steps
    if CAUSAL:  # the other group may see more
        visible_end = gl.minimum(first_row + ROWS - 1, len_q * G - 1) // G + len_k - len_q + 1
        group_steps = gl.minimum(gl.maximum(gl.cdiv(visible_end, BLOCK) - begin, 1), steps)
    for step in range(group_steps - 1):
        j = begin + step
        ds = _row_weights(
            s, dp, lse, delta, j * BLOCK, last, window, scale_log2, j >= plain_end, WINDOWED
        )
        ds = gl.convert_layout(ds.to(dtype), WEIGHTS)
        keys, _ = wait_pair(ring, step)
        next_keys, next_values = wait_pair(ring, step + 1)
        dq = warpgroup_mma(ds, keys, dq, is_async=True)
        s, dp = start_scores(q, do, s, dp, next_keys, next_values)
        s, dp, dq, ds = warpgroup_mma_wait(0, [s, dp, dq, ds])
        free_pair(ring, step)
    j = begin + group_steps - 1
    ds = _row_weights(
        s, dp, lse, delta, j * BLOCK, last, window, scale_log2, j >= plain_end, WINDOWED
    )
    ds = gl.convert_layout(ds.to(dtype), WEIGHTS)
    keys, _ = wait_pair(ring, group_steps - 1)
    if len_k - j * BLOCK < BLOCK:
        clear(keys, len_k - j * BLOCK)
    dq = warpgroup_mma(ds, keys, dq, is_async=True)
    dq, ds = warpgroup_mma_wait(0, [dq, ds])
    free_pair(ring, group_steps - 1)
    for step in range(group_steps, steps):
        wait_pair(ring, step)
        free_pair(ring, step)

    write_rows(dq * scale, q_smem, dq_ptr, first_row, q_start, len_q, hk, G, HK * G)


@gluon.jit(do_not_specialize=["B", "T", "window"])
def _dq_hopper_kernel(
    q_ptr, do_ptr, k_desc, v_desc, lse_ptr, delta_ptr, dq_ptr, cu_q_ptr, cu_k_ptr, B, T,
    scale_log2, scale, window, stride_qt, stride_qh, k_head, v_head, HK: gl.constexpr,
    G: gl.constexpr, DIM: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr,
    DEPTH: gl.constexpr,
):  # fmt: skip
    """One program for each block of packed rows, over all of its keys."""
    BM: gl.constexpr = GROUPS * ROWS
    block = gl.num_programs(0) - 1 - gl.program_id(0)  # the longest rows first
    hk = gl.program_id(1)
    b, q_start, len_q, first_row = find_sequence(cu_q_ptr, block, B, G, BM)
    if first_row >= len_q * G:
        return
    k_start = gl.load(cu_k_ptr + b)
    len_k = gl.load(cu_k_ptr + b + 1) - k_start
    visible_begin, shared_end, visible_end = visible_keys(
        first_row, len_q, len_k, window, G, BM, BLOCK, CAUSAL, WINDOWED
    )
    begin = visible_begin // BLOCK
    steps = gl.maximum(gl.cdiv(visible_end, BLOCK) - begin, 1)
    plain_end = gl.minimum(shared_end, visible_end) // BLOCK
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DIM], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, DIM], tile)
    do_smem = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, DIM], tile)
    ring = new_ring(dtype, DEPTH, DIM)
    fence_async_shared()
    args = (
        q_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, q_smem, do_smem, ring, first_row, q_start, len_q,
        len_k, hk, begin, steps, plain_end, scale_log2, scale, window, T, stride_qt, stride_qh,
    )  # fmt: skip
    keys = (k_desc, v_desc, ring, k_start + begin * BLOCK, hk * k_head, hk * v_head, steps)
    gl.warp_specialize(
        [
            (_queries_gradients, (args, HK, G, DIM, CAUSAL, WINDOWED, 0)),
            (_queries_gradients, (args, HK, G, DIM, CAUSAL, WINDOWED, 1)),
            (_copy_pairs, (keys,)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


def queries_gradient(
    cache: ShapeCache, call: AttentionCall, do: Tensor, lse: Tensor, delta: Tensor, dq: Tensor
) -> None:
    """Fill dq in all sequences, for inputs that `rings.can_read` accepts."""
    q, k, v, batch, kv_heads, group = call.q, call.k, call.v, call.batch, call.kv_heads, call.group
    (tokens, _, dim), scale, window = q.shape, call.scale, call.window
    blocks = tokens * group // (GROUPS.value * ROWS.value) + batch
    launch(
        cache, _dq_hopper_kernel, (blocks, kv_heads, 1),
        (q, do, *descriptors(k, v), lse, delta, dq, call.cu_q, call.lens_k, batch, tokens,
         scale * LOG2E, scale, window or 0, q.stride(0), q.stride(1), k.stride(1), v.stride(1),
         kv_heads, group, dim, call.causal, window is not None, DEPTH),
        {"num_warps": 4, "maxnreg": 168},
    )  # fmt: skip
