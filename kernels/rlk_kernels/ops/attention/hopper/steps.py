# ruff: noqa: RUF005 (Gluon has no starred tuples)
"""The forward of `kernels.py` on Hopper: the same order and bits with another schedule.

One warp copies keys and values (TMA, page by page from a paged cache) into two rings of blocks as
fast as blocks become free. Each group of four warps has 64 packed rows. It turns the scores of one
block into weights while the tensor core multiplies for the other groups, then starts two products
at once: the scores of the next block, and the values of this block. `hopper/blocks.py` and
`hopper/pieces.py` consist of these steps. Written in Gluon, which ships with Triton; functions that
need no layouts are those of `order.py`.
"""

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rlk_kernels.matmul.hopper.pipeline import (
    ROWS,
    async_load,
    barriers,
    tensor_map_at,
    thread_barrier,
)
from rlk_kernels.ops.attention.order import (
    CHUNK,
    block_of_halves,
    merge,
    one_sum,
    sum_levels,
    weights_below,
)

DIMS = (64, 128, 256)
"""The head sizes of these kernels."""
CHUNK_KEYS = gl.constexpr(CHUNK)
"""Keys of a chunk."""


@gluon.jit
def _copy_block(desc, ring, full, empty, turn, rows, column, LENGTH: gl.constexpr):
    """Copy the `turn`-th block of a ring: parts of LENGTH keys from `rows` of the keys or
    values."""
    DEPTH: gl.constexpr = ring.type.shape[0]
    BLOCK: gl.constexpr = ring.type.shape[1]
    slot = turn % DEPTH
    ready = full.index(slot)
    mbarrier.wait(empty.index(slot), (turn // DEPTH & 1) ^ 1)
    mbarrier.expect(ready, BLOCK // LENGTH * desc.block_type.nbytes)
    for i in gl.static_range(BLOCK // LENGTH):
        part = ring.index(slot).slice(i * LENGTH, LENGTH)
        async_load(desc, [rows[i], column], ready, part)


@gluon.jit
def copy_keys(args, PAGE: gl.constexpr, LENGTH: gl.constexpr):
    """Copy the blocks begin ... end with one warp, after `turn` earlier blocks."""
    (
        k_desc, v_desc, k_ring, v_ring, k_full, k_empty, v_full, v_empty, table, start, len_k,
        k_column, v_column, k_page, v_page, begin, end, turn,
    ) = args  # fmt: skip
    BLOCK: gl.constexpr = k_ring.type.shape[1]
    for j in range(begin, end):
        k_rows = ()
        v_rows = ()
        for i in gl.static_range(BLOCK // LENGTH):
            key = j * BLOCK + i * LENGTH
            if PAGE > 0:
                # after the last key any page may be read: scores are masked, values are cleared
                key = gl.minimum(key, gl.maximum(len_k - 1, 0) // LENGTH * LENGTH)
                page = gl.load(table + key // PAGE)
                k_rows = k_rows + (page * k_page + key % PAGE,)
                v_rows = v_rows + (page * v_page + key % PAGE,)
            else:
                k_rows = k_rows + (start + key,)
                v_rows = v_rows + (start + key,)
        _copy_block(k_desc, k_ring, k_full, k_empty, turn + j - begin, k_rows, k_column, LENGTH)
        _copy_block(v_desc, v_ring, v_full, v_empty, turn + j - begin, v_rows, v_column, LENGTH)


@gluon.jit
def wait_block(ring, full, turn):
    """Wait for the `turn`-th block of a ring and return it."""
    DEPTH: gl.constexpr = ring.type.shape[0]
    mbarrier.wait(full.index(turn % DEPTH), turn // DEPTH & 1)
    return ring.index(turn % DEPTH)


@gluon.jit
def free_block(ring, empty, turn):
    DEPTH: gl.constexpr = ring.type.shape[0]
    mbarrier.arrive(empty.index(turn % DEPTH))


@gluon.jit
def clear_rows(values, count, WARPS: gl.constexpr = 4):
    """Set the rows after the first `count` to zero, because 0 x NaN is NaN."""
    DIM: gl.constexpr = values.type.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [WARPS, 1], [1, 0])
    row = gl.arange(0, values.type.shape[0], gl.SliceLayout(1, layout))
    x = values.load(layout)
    thread_barrier()
    values.store(gl.where((row < count)[:, None], x, 0.0))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def mask_scores(s, m, scale, first, last, window, masked, WINDOWED: gl.constexpr):
    """(scores of a block, -inf where a row does not see the key; the maximum after them)."""
    BLOCK: gl.constexpr = s.shape[1]
    if masked:
        key = first + gl.arange(0, BLOCK, gl.SliceLayout(0, s.type.layout))
        visible = key[None, :] <= last[:, None]
        if WINDOWED:
            visible &= key[None, :] > (last - window)[:, None]
        s = gl.where(visible, s, float("-inf"))
    # over eight columns first: shorter chains of dependent operations
    top = gl.max(gl.max(gl.reshape(s, (ROWS, BLOCK // 8, 8)), 1), 1)
    return s, gl.maximum(m, gl.convert_layout(top, gl.SliceLayout(1, s.type.layout)) * scale)


@gluon.jit
def weigh(
    s, m, den, scale, first, last, window, masked, dtype: gl.constexpr, OUT: gl.constexpr,
    WINDOWED: gl.constexpr,
):  # fmt: skip
    """Add one block of scores to the state of a chunk: (weights as an operand, m, den,
    rescaling)."""
    s, top = mask_scores(s, m, scale, first, last, window, masked, WINDOWED)
    p, m, old, sums = weights_below(s, m, top, scale, sum_levels(s.shape[1]))
    den = gl.fma(den, gl.convert_layout(old, gl.SliceLayout(1, sums.type.layout))[:, None], sums)
    operand = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, OUT, 2))
    return operand, m, den, gl.convert_layout(old, gl.SliceLayout(1, OUT))


@gluon.jit
def merge_chunk(m_all, den_all, merged, some, m, den, acc):
    """`merge` with the chunks before, whose sum is in `merged` if there are `some`."""
    layout: gl.constexpr = acc.type.layout
    before = gl.zeros_like(acc)
    if some:
        before = merged.load(layout)
    m = gl.convert_layout(m, gl.SliceLayout(1, layout))
    den = gl.convert_layout(one_sum(den), gl.SliceLayout(1, layout))
    return merge(m_all, den_all, before, m, den, acc)


@gluon.constexpr_function
def wide_layout(dim):
    """The layout of [64, dim] in which a thread of four warps has 16 bytes of a row."""
    return gl.BlockedLayout([1, 8], [256 // dim, dim // 8], [4, 1], [1, 0])


@gluon.jit
def write_rows(
    x, staging, out_ptr, first_row, start, length, hk, G: gl.constexpr, HEADS: gl.constexpr
):
    """Write 64 packed rows x of a sequence of `length` tokens to out[tokens, HEADS, DIM], by way of
    staging[64, DIM] in shared memory, so that a thread writes 16 bytes of a row, not 4."""
    DIM: gl.constexpr = x.shape[1]
    staging.store(x.to(staging.dtype))
    thread_barrier()
    WIDE: gl.constexpr = wide_layout(DIM)
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
    at = ((start + row // G).to(gl.int64) * HEADS + hk * G + row % G) * DIM
    at = at[:, None] + gl.arange(0, DIM, gl.SliceLayout(0, WIDE))[None, :]
    gl.store(out_ptr + at, staging.load(WIDE), mask=(row < length * G)[:, None])


@gluon.jit
def load_queries(
    q_ptr, q, first_row, q_start, len_q, hk, stride_qt, stride_qh, G: gl.constexpr,
    LOAD: gl.constexpr,
):  # fmt: skip
    """Load packed rows into q[rows, DIM] in shared memory, by threads in the layout LOAD, with
    zeros after the sequence."""
    R: gl.constexpr = q.type.shape[0]
    DIM: gl.constexpr = q.type.shape[1]
    row = first_row + gl.arange(0, R, gl.SliceLayout(1, LOAD))
    at = (q_start + row // G).to(gl.int64) * stride_qt + (hk * G + row % G) * stride_qh
    at = at[:, None] + gl.arange(0, DIM, gl.SliceLayout(0, LOAD))[None, :]
    q.store(gl.load(q_ptr + at, mask=(row < len_q * G)[:, None], other=0.0))
    fence_async_shared()


@gluon.jit
def first_scores(q, s, k_ring, k_full, k_empty, turn):
    """The scores of the `turn`-th block, after they are complete."""
    keys = wait_block(k_ring, k_full, turn)
    s = warpgroup_mma(q, keys.permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, [s])
    free_block(k_ring, k_empty, turn)
    return s


@gluon.jit
def next_block(q, s, p, acc, fresh, keys, values):
    """(scores of the next block of keys, sums with the values of this block). Both blocks are
    complete: a wait here would prevent the compiler from overlapping other work."""
    scores = warpgroup_mma(q, keys.permute((1, 0)), s, use_acc=False, is_async=True)
    sums = warpgroup_mma(p, values, acc, use_acc=not fresh, is_async=True)
    s, acc, p = warpgroup_mma_wait(0, [scores, sums, p])
    return s, acc


@gluon.jit
def last_block(p, acc, fresh, v_ring, v_full, v_empty, turn, count):
    """The sums with the last values, of which the first `count` belong to the sequence."""
    values = wait_block(v_ring, v_full, turn)
    if count < values.type.shape[0]:
        clear_rows(values, count)
    sums = warpgroup_mma(p, values, acc, use_acc=not fresh, is_async=True)
    acc, p = warpgroup_mma_wait(0, [sums, p])
    free_block(v_ring, v_empty, turn)
    return acc


@gluon.jit
def _ring(
    DEPTH: gl.constexpr, DIM: gl.constexpr, GROUPS: gl.constexpr, tile: gl.constexpr,
    dtype: gl.constexpr,
):  # fmt: skip
    """(blocks, barriers of full blocks, barriers of empty blocks)."""
    ring = gl.allocate_shared_memory(dtype, [DEPTH, block_of_halves(DIM), DIM], tile)
    full, empty = barriers(DEPTH, GROUPS)
    return ring, full, empty


@gluon.jit
def buffers(
    q_ptr, DIM: gl.constexpr, GROUPS: gl.constexpr, K_DEPTH: gl.constexpr, V_DEPTH: gl.constexpr,
    RUNNING: gl.constexpr,
):  # fmt: skip
    """(queries, merged chunks, keys, their two barriers, values, their two barriers), in shared
    memory."""
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DIM], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, DIM], tile)
    k_ring, k_full, k_empty = _ring(K_DEPTH, DIM, GROUPS, tile, dtype)
    v_ring, v_full, v_empty = _ring(V_DEPTH, DIM, GROUPS, tile, dtype)
    merged = q_smem
    if not RUNNING:
        # the eight rows of a warp are in different banks
        swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        merged = gl.allocate_shared_memory(gl.float32, [GROUPS, ROWS, DIM], swizzled)
    fence_async_shared()
    return q_smem, merged, k_ring, k_full, k_empty, v_ring, v_full, v_empty


@functools.lru_cache(maxsize=256)
def as_matrix(shape: torch.Size, stride: tuple[int, ...], paged: bool) -> tuple[int, int] | None:
    """(rows, columns) of the keys or values as a matrix with all heads in a row, or None."""
    *_, heads, dim = shape
    pitch, head = stride[-3], stride[-2]
    rows = shape[0]
    if paged:
        pages, page = shape[:2]
        if pitch == 0 or stride[0] % pitch:
            return None
        rows = (pages - 1) * (stride[0] // pitch) + page
    width = (heads - 1) * head + dim
    fits = stride[-1] == 1 and width <= pitch and pitch % 8 == 0 and rows > 0
    return (rows, width) if fits else None


def keys_per_copy(page: int, block: int) -> int:
    """Keys of one copy from a paged cache; 0 if pages cannot form whole blocks of keys."""
    if page % block == 0:
        return block
    return page if page >= 8 and block % page == 0 else 0


def can_read(k: Tensor, v: Tensor, table: Tensor | None) -> bool:
    """Whether these kernels can read k and v."""
    paged, block = table is not None, block_of_halves(k.shape[-1])
    if table is not None and not (keys_per_copy(k.shape[1], block) and table.numel()):
        return False
    return all(
        as_matrix(x.shape, x.stride(), paged) is not None and x.data_ptr() % 16 == 0 for x in (k, v)
    )


def descriptors(k: Tensor, v: Tensor, table: Tensor | None) -> list:
    """Tensor maps of what `can_read` accepts."""
    paged, block = table is not None, block_of_halves(k.shape[-1])
    box = (keys_per_copy(k.shape[1], block) if paged else block, k.shape[-1])
    return [
        tensor_map_at(x.data_ptr(), x.dtype, size, (x.stride(-3), 1), box)
        for x in (k, v)
        if (size := as_matrix(x.shape, x.stride(), paged)) is not None
    ]
