# ruff: noqa: RUF005, SIM102 (Gluon has no starred tuples; RIGHT is a constexpr)
"""The forward of `kernels.py` on Hopper, in Gluon: the same order and bits with another schedule.

A program has 64 packed rows at a time, with pieces of their keys (`attention/hopper/work.py`). The
sums of 64 rows of 512 features are too many for one group of four warps, so two groups have half of
the features each. The left group computes scores and weights, and gives the weights to the right
group through shared memory; then both multiply the weights with their half of the block's latents,
while the left group's next scores wait behind that product. A third group, of one warp, copies
blocks of latents (TMA, page by page from a paged cache), each in two halves that become free
separately, the rotated features with the left half.

    left    scores(j) -> weights(j) -> left sums(j), scores(j + 1) -> weights(j + 1) -> ...
    right                              right sums(j)                                    ...

Names as in `kernels.py`. A state is (maximum, sum, accumulator).
"""

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
    thread_barrier,
)
from rlk_kernels.ops.attention.hopper.rings import BLOCK, clear
from rlk_kernels.ops.attention.hopper.steps import load_queries, weigh, wide_layout
from rlk_kernels.ops.attention.hopper.work import (
    all_work,
    blocks_of,
    next_piece,
    store_state,
    this_program,
)
from rlk_kernels.ops.attention.order import block_weights, finish, merge, one_sum, sum_levels
from rlk_kernels.ops.attention.schedule import slot_row
from rlk_kernels.ops.latent_attention.kernels import CHUNK

LATENT, ROTATED = gl.constexpr(512), gl.constexpr(64)
"""The features of a latent and the rotated features that this kernel takes."""
HALF = gl.constexpr(256)
"""Features of a group's half of a latent."""
CHUNK_KEYS = gl.constexpr(CHUNK)
DEPTH = gl.constexpr(2)
"""Blocks of latents in shared memory."""
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
OF_ROWS = gl.constexpr(gl.SliceLayout(1, SUMS.value))
FACTOR, MAXIMUM, SUM = (gl.constexpr(i) for i in range(3))
"""What the left group gives to the right group besides weights: the factor of the sums before a
block; after the last block of a chunk, its maximum and its sum."""


@gluon.jit
def _start_rotated(q, ring, turn, s):
    """Start the scores [rows, keys] of the `turn`-th block, which is complete, with the product of
    the rotated features."""
    _, _, q_rotated = q
    _, _, rotated, left_full, _, right_full, _ = ring
    slot = turn % DEPTH
    mbarrier.wait(left_full.index(slot), turn // DEPTH & 1)
    mbarrier.wait(right_full.index(slot), turn // DEPTH & 1)
    keys = rotated.index(slot).permute((1, 0))
    return warpgroup_mma(q_rotated, keys, s, use_acc=False, is_async=True)


@gluon.jit
def _start_latents(q, ring, turn, s):
    """Start the product of the latents, which is added to the scores."""
    q_left, q_right, _ = q
    left, right, _, _, _, _, _ = ring
    slot = turn % DEPTH
    s = warpgroup_mma(q_left, left.index(slot).permute((1, 0)), s, is_async=True)
    return warpgroup_mma(q_right, right.index(slot).permute((1, 0)), s, is_async=True)


@gluon.jit
def _complete(ring, turn, s):
    """The scores of the `turn`-th block, whose products have all started."""
    _, _, _, _, _, _, right_empty = ring
    s = warpgroup_mma_wait(0, [s])
    mbarrier.arrive(right_empty.index(turn % DEPTH))
    return s


@gluon.jit
def _end_scores(q, ring, turn, s):
    """The scores of the `turn`-th block, after `_start_rotated`."""
    return _complete(ring, turn, _start_latents(q, ring, turn, s))


@gluon.jit
def _give(given, turn, p, old):
    """Give the weights of the `turn`-th block, and the factor of the sums before them."""
    weights, numbers, _, empty = given
    mbarrier.wait(empty.index(0), (turn & 1) ^ 1)
    weights.store(p)
    numbers.index(FACTOR).store(old)


@gluon.jit
def _given(given):
    """Tell the right group that everything is given."""
    _, _, full, _ = given
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(full.index(0))


@gluon.jit
def _attend_left(q, ring, given, s, begin, end, plain_end, len_k, last, turn, scale):
    """(m, den, left half of acc) of the blocks begin ... end, at least one, all of one chunk.
    s: the scores of the first one."""
    left, _, _, _, left_empty, _, _ = ring
    dtype: gl.constexpr = left.dtype
    acc = gl.zeros([ROWS, HALF], gl.float32, SUMS)
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    _, _, _, den = block_weights(gl.zeros_like(s), m, 0.0, sum_levels(BLOCK))
    for j in range(begin, end - 1):
        p, m, den, old = weigh(
            s, m, den, scale, j * BLOCK, last, 0, j >= plain_end, dtype, SUMS, False
        )
        here = turn + j - begin
        _give(given, here, p, old)
        _given(given)
        acc = acc * old[:, None]
        slot = here % DEPTH
        sums = warpgroup_mma(p, left.index(slot), acc, use_acc=j != begin, is_async=True)
        scores = _start_rotated(q, ring, here + 1, s)
        # A warp continues after a product only when the tensor core is about to take it. So the
        # block is free before the rest of the scores starts, and not after that.
        acc, p = warpgroup_mma_wait(1, [sums, p])
        mbarrier.arrive(left_empty.index(slot))
        s = _end_scores(q, ring, here + 1, scores)
    j = end - 1
    p, m, den, old = weigh(s, m, den, scale, j * BLOCK, last, 0, j >= plain_end, dtype, SUMS, False)
    here = turn + j - begin
    _give(given, here, p, old)
    _, numbers, _, _ = given
    m = gl.convert_layout(m, OF_ROWS)
    den = gl.convert_layout(one_sum(den), OF_ROWS)
    numbers.index(MAXIMUM).store(m)
    numbers.index(SUM).store(den)
    _given(given)
    acc = acc * old[:, None]
    slot = here % DEPTH
    if len_k - j * BLOCK < BLOCK:
        clear(left.index(slot), len_k - j * BLOCK)
    sums = warpgroup_mma(p, left.index(slot), acc, use_acc=j != begin, is_async=True)
    acc, p = warpgroup_mma_wait(0, [sums, p])
    mbarrier.arrive(left_empty.index(slot))
    return m, den, acc


@gluon.jit
def _attend_right(ring, given, begin, end, len_k, turn):
    """`_attend_left` with the right half of acc and the other group's weights."""
    _, right, _, _, _, right_full, right_empty = ring
    weights, numbers, full, empty = given
    acc = gl.zeros([ROWS, HALF], gl.float32, SUMS)
    m = gl.full([ROWS], float("-inf"), gl.float32, OF_ROWS)
    den = gl.zeros([ROWS], gl.float32, OF_ROWS)
    for j in range(begin, end):
        here = turn + j - begin
        slot = here % DEPTH
        mbarrier.wait(right_full.index(slot), here // DEPTH & 1)
        mbarrier.wait(full.index(0), here & 1)
        acc = acc * numbers.index(FACTOR).load(OF_ROWS)[:, None]
        if j == end - 1:
            m = numbers.index(MAXIMUM).load(OF_ROWS)
            den = numbers.index(SUM).load(OF_ROWS)
            if len_k - j * BLOCK < BLOCK:
                clear(right.index(slot), len_k - j * BLOCK)
        sums = warpgroup_mma(weights, right.index(slot), acc, use_acc=j != begin, is_async=True)
        acc = warpgroup_mma_wait(0, [sums])
        thread_barrier()  # all threads have read the numbers
        mbarrier.arrive(empty.index(0))
        mbarrier.arrive(right_empty.index(slot))
    return m, den, acc


@gluon.jit
def _halves(x):
    """The left and the right half of the columns of x."""
    return gl.split(gl.permute(gl.reshape(x, (ROWS, 2, x.shape[1] // 2)), (0, 2, 1)))


@gluon.jit
def _beside(x, y):
    """The columns of x, and right of them those of y."""
    return gl.reshape(gl.permute(gl.join(x, y), (0, 2, 1)), (ROWS, 2 * x.shape[1]))


@gluon.jit
def _by_thread(x):
    """x[ROWS, columns] as one row, in which the numbers of a thread lie four by four, and those of
    the threads of a group side by side."""
    x = gl.reshape(x, (4, 2, 8, x.shape[1] // 8, 4, 2))
    return gl.reshape(gl.permute(x, (3, 0, 2, 4, 1, 5)), (x.numel,))


@gluon.jit
def _by_row(x, layout: gl.constexpr):
    """The inverse of `_by_thread`."""
    COLUMNS: gl.constexpr = x.shape[0] // ROWS
    x = gl.permute(gl.reshape(x, (COLUMNS // 8, 4, 8, 4, 2, 2)), (1, 4, 2, 0, 3, 5))
    return gl.convert_layout(gl.reshape(x, (ROWS, COLUMNS)), layout, assert_trivial=True)


@gluon.jit
def _merge_columns(running, some, m_all, den_all, m, den, acc, KEEP: gl.constexpr):
    """`_merge` for some columns of acc."""
    layout: gl.constexpr = acc.type.layout
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    at = running + gl.arange(0, acc.numel, _by_thread(acc).type.layout)
    m_all, den_all, acc = merge(
        gl.convert_layout(m_all, rows, assert_trivial=True),
        gl.convert_layout(den_all, rows, assert_trivial=True),
        _by_row(gl.load(at, mask=some, other=0.0), layout),
        gl.convert_layout(m, rows, assert_trivial=True),
        gl.convert_layout(den, rows, assert_trivial=True),
        acc,
    )
    if KEEP:
        gl.store(at, _by_thread(acc))
    return m_all, den_all, acc


@gluon.jit
def _merge(running, some, m_all, den_all, m, den, acc, KEEP: gl.constexpr):
    """Merge the state of a chunk with that of the chunks before, whose sums are in `running` if
    there are `some`. KEEP: the new sums go there. A quarter of the columns at a time, because not
    all sums of the chunks before fit into registers beside acc."""
    x, y = _halves(acc)
    a, b = _halves(x)
    c, d = _halves(y)
    _, _, a = _merge_columns(running, some, m_all, den_all, m, den, a, KEEP)
    _, _, b = _merge_columns(running + a.numel, some, m_all, den_all, m, den, b, KEEP)
    _, _, c = _merge_columns(running + 2 * a.numel, some, m_all, den_all, m, den, c, KEEP)
    top, total, d = _merge_columns(running + 3 * a.numel, some, m_all, den_all, m, den, d, KEEP)
    acc = _beside(_beside(a, b), _beside(c, d))
    return (
        gl.convert_layout(top, OF_ROWS, assert_trivial=True),
        gl.convert_layout(total, OF_ROWS, assert_trivial=True),
        gl.convert_layout(acc, SUMS, assert_trivial=True),
    )


@gluon.jit
def _attend_piece(args, one, begin, end, plain_end, turn, H: gl.constexpr, RIGHT: gl.constexpr):
    """Attend with the packed rows of a piece, over blocks from the `turn`-th on. Both groups store
    the numbers of their rows, which are equal, and each its half of the sums."""
    (
        _, q_ptr, out_ptr, lse_ptr, part_acc_ptr, part_ml_ptr, running_ptr, q, ring, given, scale,
        T, stride_qt, stride_qh,
    ) = args  # fmt: skip
    _, q_start, len_q, _, len_k, first_row, _, _, only, merges, folded, base = one
    PER_CHUNK: gl.constexpr = CHUNK_KEYS // BLOCK
    if not RIGHT:
        thread_barrier()  # the previous piece has read its queries
        q_left, q_right, q_rotated = q
        rows = (first_row, q_start, len_q, 0, stride_qt, stride_qh)
        WIDE: gl.constexpr = wide_layout(HALF)
        load_queries(q_ptr, q_left, *rows, H, WIDE)
        load_queries(q_ptr + HALF, q_right, *rows, H, WIDE)
        load_queries(q_ptr + LATENT, q_rotated, *rows, H, wide_layout(ROTATED))
        thread_barrier()
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    last = gl.minimum(row // H + len_k - len_q, len_k - 1)  # the last key a row sees
    cols = RIGHT * HALF + gl.arange(0, HALF, gl.SliceLayout(0, SUMS))
    row = first_row + gl.arange(0, ROWS, OF_ROWS)
    live = row < len_q * H
    running = running_ptr + (this_program() * 2 + RIGHT).to(gl.int64) * (ROWS * HALF)
    m_all = gl.full([ROWS], float("-inf"), gl.float32, OF_ROWS)
    den_all = gl.zeros([ROWS], gl.float32, OF_ROWS)
    acc_all = gl.zeros([ROWS, HALF], gl.float32, SUMS)
    s = gl.zeros([ROWS, BLOCK], gl.float32, SCORES)
    if not RIGHT:
        if begin < end:
            s = _end_scores(q, ring, turn, _start_rotated(q, ring, turn, s))
    beyond = gl.where(begin < end, gl.cdiv(end, PER_CHUNK), 0)  # rows may see none of these keys
    for chunk in range(begin // PER_CHUNK, beyond):
        first = gl.maximum(begin, chunk * PER_CHUNK)
        limit = gl.minimum(end, (chunk + 1) * PER_CHUNK)
        if RIGHT:
            m, den, acc = _attend_right(ring, given, first, limit, len_k, turn)
        else:
            m, den, acc = _attend_left(
                q, ring, given, s, first, limit, plain_end, len_k, last, turn, scale
            )
        turn += limit - first
        more = limit < end
        if (merges != 0) & more:
            if not RIGHT:
                # the next block's scores, while the sums go to memory
                s = _start_latents(q, ring, turn, _start_rotated(q, ring, turn, s))
            m_all, den_all, acc_all = _merge(
                running, first > begin, m_all, den_all, m, den, acc, True
            )
            if not RIGHT:
                s = _complete(ring, turn, s)
        else:
            s = gl.zeros_like(s)
            if merges != 0:
                m_all, den_all, acc_all = _merge(
                    running, first > begin, m_all, den_all, m, den, acc, False
                )
            else:
                slot = slot_row(base, chunk, folded, len_q * H, row, 1, 0)
                store_state(part_acc_ptr, part_ml_ptr, slot, live, cols, m, den, acc, LATENT)
                acc_all = acc  # no register holds an earlier sum
                if not RIGHT:
                    if more:
                        s = _end_scores(q, ring, turn, _start_rotated(q, ring, turn, s))
    if only != 0:
        finish(
            m_all, den_all, acc_all, out_ptr, lse_ptr, q_start + row // H, row % H, live, cols, H,
            LATENT, T,
        )  # fmt: skip
    elif (merges != 0) & (begin < end):
        slot = slot_row(base, folded, folded, len_q * H, row, 1, 0)
        store_state(part_acc_ptr, part_ml_ptr, slot, live, cols, m_all, den_all, acc_all, LATENT)


@gluon.jit
def _attend_pieces(
    args, H: gl.constexpr, HOW: gl.constexpr, PAGED: gl.constexpr, RIGHT: gl.constexpr
):
    """Attend with the pieces of a program, one after another."""
    work, _, _, _, _, _, _, _, _, _, _, _, _, _ = args
    turn = 0
    total, lone = all_work(work, 0, HOW, 1, H, ROWS, CHUNK_KEYS, True, False, PAGED)
    for i in range(gl.program_id(0), total, gl.num_programs(0)):
        one = next_piece(work, lone, total - 1 - i, HOW, H, ROWS, CHUNK_KEYS, PAGED)
        begin, end, plain_end = blocks_of(one, 0, H, ROWS, BLOCK, CHUNK_KEYS, True, False)
        _attend_piece(args, one, begin, end, plain_end, turn, H, RIGHT)
        turn += gl.maximum(end - begin, 0)


@gluon.jit
def _copy_block(latents, rotation, ring, turn, rows, LENGTH: gl.constexpr):
    """Copy the `turn`-th block: parts of LENGTH keys from `rows` on."""
    left, right, rotated, left_full, left_empty, right_full, right_empty = ring
    slot = turn % DEPTH
    PARTS: gl.constexpr = BLOCK // LENGTH
    ready = left_full.index(slot)
    mbarrier.wait(left_empty.index(slot), (turn // DEPTH & 1) ^ 1)
    mbarrier.expect(ready, PARTS * (latents.block_type.nbytes + rotation.block_type.nbytes))
    for i in gl.static_range(PARTS):
        part = rotated.index(slot).slice(i * LENGTH, LENGTH)
        async_load(rotation, [rows[i], LATENT], ready, part)
        part = left.index(slot).slice(i * LENGTH, LENGTH)
        async_load(latents, [rows[i], 0], ready, part)
    ready = right_full.index(slot)
    mbarrier.wait(right_empty.index(slot), (turn // DEPTH & 1) ^ 1)
    mbarrier.expect(ready, PARTS * latents.block_type.nbytes)
    for i in gl.static_range(PARTS):
        part = right.index(slot).slice(i * LENGTH, LENGTH)
        async_load(latents, [rows[i], HALF], ready, part)


@gluon.jit
def _copy_pieces(
    args, H: gl.constexpr, HOW: gl.constexpr, PAGE: gl.constexpr, LENGTH: gl.constexpr
):
    """Copy the blocks of a program's pieces; the next piece is loaded early."""
    work, latents, rotation, ring, table_ptr, stride_table, page_rows = args
    turn = 0
    total, lone = all_work(work, 0, HOW, 1, H, ROWS, CHUNK_KEYS, True, False, PAGE > 0)
    item = gl.maximum(total - 1 - gl.program_id(0), 0)
    one = next_piece(work, lone, item, HOW, H, ROWS, CHUNK_KEYS, PAGE > 0)
    for i in range(gl.program_id(0), total, gl.num_programs(0)):
        item = gl.maximum(total - 1 - i - gl.num_programs(0), 0)
        following = next_piece(work, lone, item, HOW, H, ROWS, CHUNK_KEYS, PAGE > 0)
        begin, end, _ = blocks_of(one, 0, H, ROWS, BLOCK, CHUNK_KEYS, True, False)
        b, _, _, k_start, len_k, _, _, _, _, _, _, _ = one
        table = table_ptr + b.to(gl.int64) * stride_table
        for j in range(begin, end):
            rows = ()
            for part in gl.static_range(BLOCK // LENGTH):
                key = j * BLOCK + part * LENGTH
                if PAGE > 0:
                    # after the last key any page may be read: scores are masked, latents cleared
                    key = gl.minimum(key, gl.maximum(len_k - 1, 0) // LENGTH * LENGTH)
                    rows = rows + (gl.load(table + key // PAGE) * page_rows + key % PAGE,)
                else:
                    rows = rows + (k_start + key,)
            _copy_block(latents, rotation, ring, turn + j - begin, rows, LENGTH)
        turn += gl.maximum(end - begin, 0)
        one = following


@gluon.jit
def _tiles(dtype: gl.constexpr, COUNT: gl.constexpr, COLUMNS: gl.constexpr):
    """[COUNT, 64, COLUMNS] in shared memory, in the layout of the tensor core."""
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], dtype)
    return gl.allocate_shared_memory(dtype, [COUNT, ROWS, COLUMNS], tile)


@gluon.jit(do_not_specialize=["B", "T", "capacity", "target", "stride_table"])
def latent_hopper_kernel(
    plan_ptr, pieces_ptr, cu_q_ptr, lens_ptr, q_ptr, latents, rotation, out_ptr, lse_ptr,
    part_acc_ptr, part_ml_ptr, running_ptr, table_ptr, B, T, capacity, target, scale, stride_qt,
    stride_qh, page_rows, stride_table,
    H: gl.constexpr, HOW: gl.constexpr, PAGE: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    queries = _tiles(dtype, 2, HALF)
    q = (queries.index(0), queries.index(1), _tiles(dtype, 1, ROTATED).index(0))
    left_full, left_empty = barriers(DEPTH, 1)
    right_full, right_empty = barriers(DEPTH, 2)
    ring = (
        _tiles(dtype, DEPTH, HALF), _tiles(dtype, DEPTH, HALF), _tiles(dtype, DEPTH, ROTATED),
        left_full, left_empty, right_full, right_empty,
    )  # fmt: skip
    full, empty = barriers(1, 1)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    numbers = gl.allocate_shared_memory(gl.float32, [3, ROWS], plain)
    given = (_tiles(dtype, 1, BLOCK).index(0), numbers, full, empty)
    fence_async_shared()
    if OVERLAP:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
    work = (plan_ptr, pieces_ptr, cu_q_ptr, lens_ptr, B, T, capacity, target)
    LENGTH: gl.constexpr = latents.block_type.shape[0]
    args = (
        work, q_ptr, out_ptr, lse_ptr, part_acc_ptr, part_ml_ptr, running_ptr, q, ring, given,
        scale, T, stride_qt, stride_qh,
    )  # fmt: skip
    keys = (work, latents, rotation, ring, table_ptr, stride_table, page_rows)
    gl.warp_specialize(
        [
            (_attend_pieces, (args, H, HOW, PAGE > 0, 0)),
            (_attend_pieces, (args, H, HOW, PAGE > 0, 1)),
            (_copy_pieces, (keys, H, HOW, PAGE, LENGTH)),
        ],
        [4, 1], [232, 40],
    )  # fmt: skip
