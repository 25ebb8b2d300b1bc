"""dk and dv of `backward.py` on Hopper: the same order and bits with another schedule.

A group of four warps has 64 keys: the keys and their values stay in shared memory, dk and dv in
registers. Scores are computed transposed, [keys, rows], so that the weights are operands without
moving between threads. Registers cannot store the scores of two blocks, so a group waits for its
products at every block while the other group works.
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
from rlk_kernels.matmul.hopper.pipeline import ROWS, async_load, new_barriers, thread_barrier
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
from rlk_kernels.ops.attention.order import LOG2E, attending_rows, find_sequence

DEPTH = 4
"""The most pairs of blocks by which copies are ahead of products."""


@gluon.jit
def _copy_rows(args, HK: gl.constexpr, G: gl.constexpr):
    """Copy keys and values, then the rows of `steps` blocks with their lse and delta, with one
    warp.

    Each block of queries is copied for all heads of the group, one after another.
    """
    (
        q_desc, do_desc, k_desc, v_desc, lse_ptr, delta_ptr, k_smem, v_smem, kv_full, ring,
        lse_ring, delta_ring, q_start, len_q, first_slot, hk, q_head, k_column, v_column, begin,
        steps, T,
    ) = args  # fmt: skip
    left, right, full, empty = ring
    DEPTH: gl.constexpr = left.type.shape[0]
    DIM: gl.constexpr = left.type.shape[2]
    nbytes: gl.constexpr = q_desc.block_type.nbytes + do_desc.block_type.nbytes
    mbarrier.expect(
        kv_full.index(0), GROUPS * (k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    )
    for i in gl.static_range(GROUPS):
        at = first_slot + i * ROWS
        async_load(k_desc, [at, k_column], kv_full.index(0), k_smem.index(i))
        async_load(v_desc, [at, v_column], kv_full.index(0), v_smem.index(i))
    lane = gl.arange(0, BLOCK, gl.BlockedLayout([2], [32], [1], [0]))
    for step in range(steps):
        slot = step % DEPTH
        head = hk * G + step % G
        first = (begin + step // G) * BLOCK
        at = head.to(gl.int64) * T + q_start + first + lane
        live = first + lane < len_q
        lse = gl.load(lse_ptr + at, mask=live, other=0.0)
        delta = gl.load(delta_ptr + at, mask=live, other=0.0)
        lse = gl.where(lse == float("-inf"), 0.0, lse * 1.4426950408889634)
        mbarrier.wait(empty.index(slot), (step // DEPTH & 1) ^ 1)
        lse_ring.index(slot).store(lse)
        delta_ring.index(slot).store(delta)
        thread_barrier()
        mbarrier.expect(full.index(slot), nbytes)
        at = q_start + first
        async_load(q_desc, [at, head * q_head], full.index(slot), left.index(slot))
        async_load(do_desc, [at, head * DIM], full.index(slot), right.index(slot))


@gluon.jit
def _visible(
    like, first, key, len_q, offset, window, last_key, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr
):  # fmt: skip
    """Whether the rows from `first` see the keys, [keys, rows] in the layout of `like`."""
    query = first + gl.arange(0, BLOCK, gl.SliceLayout(0, like.type.layout))
    visible = (key[:, None] >= 0) & (query < len_q)[None, :]
    if CAUSAL:
        visible &= key[:, None] <= (query + offset)[None, :]
    if WINDOWED:
        last = query + offset if CAUSAL else gl.zeros_like(query) + last_key
        visible &= key[:, None] > (last - window)[None, :]
    return visible


@gluon.jit
def _keys_gradients(
    args, HK: gl.constexpr, G: gl.constexpr, DIM: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """dk and dv of 64 keys over `steps` blocks of rows from block `begin` on, by four warps."""
    (
        dk_ptr, dv_ptr, k_smem, v_smem, kv_full, ring, lse_ring, delta_ring, len_q, len_k, k_start,
        first_key, hk, begin, steps, plain_begin, plain_end, scale_log2, scale, window,
    ) = args  # fmt: skip
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    COLUMN: gl.constexpr = gl.SliceLayout(0, SCORES)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    DEPTH: gl.constexpr = lse_ring.type.shape[0]
    dtype: gl.constexpr = k_smem.dtype
    first_key += GROUP * ROWS
    key = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    offset = len_k - len_q
    k = k_smem.index(GROUP)
    v = v_smem.index(GROUP)
    dk = gl.zeros([ROWS, DIM], gl.float32, OUT)
    dv = gl.zeros([ROWS, DIM], gl.float32, OUT)
    mbarrier.wait(kv_full.index(0), 0)
    s = gl.zeros([ROWS, BLOCK], gl.float32, SCORES)
    dp = gl.zeros([ROWS, BLOCK], gl.float32, SCORES)
    skipped = 0
    if CAUSAL:
        skipped = gl.minimum(gl.maximum(first_key - offset, 0) // BLOCK - begin, steps // G) * G
    for step in range(skipped):  # rows that see only keys of the other group
        wait_pair(ring, step)
        free_pair(ring, step)
    for step in range(skipped, steps):
        queries, gradients = wait_pair(ring, step)
        scores, products = start_scores(k, v, s, dp, queries, gradients)
        first = (begin + step // G) * BLOCK
        masked = (first < plain_begin) | (first + BLOCK > plain_end)
        lse = lse_ring.index(step % DEPTH).load(COLUMN)
        s = warpgroup_mma_wait(1, [scores])
        if masked:
            visible = _visible(s, first, key, len_q, offset, window, len_k - 1, CAUSAL, WINDOWED)
            s = gl.where(visible, s, float("-inf"))
        p = exp2(gl.fma(s, scale_log2, (0.0 - lse)[None, :]))
        weights = gl.convert_layout(p.to(dtype), OPERAND)
        if len_q - first < BLOCK:
            clear(queries, len_q - first)
            clear(gradients, len_q - first)
        sums = warpgroup_mma(weights, gradients, dv, is_async=True)
        dp = warpgroup_mma_wait(1, [products])
        if masked:
            visible = _visible(s, first, key, len_q, offset, window, len_k - 1, CAUSAL, WINDOWED)
            dp = gl.where(visible, dp, 0.0)
        delta = delta_ring.index(step % DEPTH).load(COLUMN)
        ds = p * (dp - delta[None, :])
        ds = gl.convert_layout(ds.to(dtype), OPERAND)
        dk = warpgroup_mma(ds, queries, dk, is_async=True)
        dv, dk, weights, ds = warpgroup_mma_wait(0, [sums, dk, weights, ds])
        free_pair(ring, step)

    key = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
    cols = gl.arange(0, DIM, gl.SliceLayout(0, OUT))
    at = ((k_start + key).to(gl.int64) * HK + hk)[:, None] * DIM + cols[None, :]
    mask = (key < len_k)[:, None]
    gl.store(dk_ptr + at, (dk * scale).to(dk_ptr.dtype.element_ty), mask=mask)
    gl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=mask)


@gluon.jit(do_not_specialize=["B", "T", "window"])
def _dkv_hopper_kernel(
    q_desc, do_desc, k_desc, v_desc, lse_ptr, delta_ptr, dk_ptr, dv_ptr, cu_q_ptr, cu_k_ptr, B, T,
    scale_log2, scale, window, q_head, k_head, v_head, HK: gl.constexpr, G: gl.constexpr,
    DIM: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """One program for each block of keys, over all rows that see them."""
    BN: gl.constexpr = GROUPS * ROWS
    hk = gl.program_id(0) % HK  # the heads of a block together, as the first block is the longest
    b, k_start, len_k, first_key = find_sequence(cu_k_ptr, gl.program_id(0) // HK, B, 1, BN)
    if first_key >= len_k:
        return
    q_start = gl.load(cu_q_ptr + b)
    len_q = gl.load(cu_q_ptr + b + 1) - q_start
    begin, end, plain_begin, plain_end = attending_rows(
        first_key, len_q, len_k, window, BN, BLOCK, CAUSAL, WINDOWED
    )
    steps = gl.maximum(end - begin, 0) * G
    dtype: gl.constexpr = dk_ptr.dtype.element_ty
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DIM], dtype)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_smem = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, DIM], tile)
    v_smem = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, DIM], tile)
    lse_ring = gl.allocate_shared_memory(gl.float32, [DEPTH, BLOCK], plain)
    delta_ring = gl.allocate_shared_memory(gl.float32, [DEPTH, BLOCK], plain)
    kv_full = new_barriers(1, 1)
    ring = new_ring(dtype, DEPTH, DIM)
    fence_async_shared()
    args = (
        dk_ptr, dv_ptr, k_smem, v_smem, kv_full, ring, lse_ring, delta_ring, len_q, len_k, k_start,
        first_key, hk, begin, steps, plain_begin, plain_end, scale_log2, scale, window,
    )  # fmt: skip
    rows = (
        q_desc, do_desc, k_desc, v_desc, lse_ptr, delta_ptr, k_smem, v_smem, kv_full, ring,
        lse_ring, delta_ring, q_start, len_q, k_start + first_key, hk, q_head, hk * k_head,
        hk * v_head, begin, steps, T,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_keys_gradients, (args, HK, G, DIM, CAUSAL, WINDOWED, 0)),
            (_keys_gradients, (args, HK, G, DIM, CAUSAL, WINDOWED, 1)),
            (_copy_rows, (rows, HK, G)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


def keys_gradients(
    cache: ShapeCache, call: AttentionCall, do: Tensor, lse: Tensor, delta: Tensor, dk: Tensor,
    dv: Tensor,
) -> None:  # fmt: skip
    """Fill dk and dv in all sequences, for inputs that `rings.can_read` accepts."""
    q, k, v, batch, kv_heads = call.q, call.k, call.v, call.batch, call.kv_heads
    (tokens, _, dim), scale, window = q.shape, call.scale, call.window
    programs = (k.shape[0] // (GROUPS.value * ROWS.value) + batch) * kv_heads
    launch(
        cache, _dkv_hopper_kernel, (programs, 1, 1),
        (*descriptors(q, do, k, v), lse, delta, dk, dv, call.cu_q, call.lens_k, batch, tokens,
         scale * LOG2E, scale, window or 0, q.stride(1), k.stride(1), v.stride(1), kv_heads,
         call.group, dim, call.causal, window is not None, DEPTH),
        {"num_warps": 4, "maxnreg": 168},
    )  # fmt: skip
