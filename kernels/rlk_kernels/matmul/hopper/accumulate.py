"""The product of `matmul/accumulate` on Hopper: the same order and bits with another schedule.

One warp copies A and B (TMA) as fast as buffers become free, and continues with the next tile. Two
groups of four warps multiply 64 rows of the tile each, and load and store their own sums. The left
half of a tile is ahead of the right half (`pipeline.lead_steps`), so that the memory traffic of
each half runs beside products of the other. Between calls the partial sums of a row are stored in
the row's own 512 bytes of `out` (left half) and 512 bytes of `lo` (right half) for each tile, in
the order of the registers: they do not pass through shared memory and are not reordered.

Two products may share a launch (the two gradients of one block); `shares.py` assigns the tiles to
the programs. Written in Gluon, which ships with Triton.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from rlk_kernels.launching import launch
from rlk_kernels.matmul.accumulate.plan import AccumulatePlan, PartialProduct
from rlk_kernels.matmul.hopper.pipeline import (
    DEPTH,
    ROWS,
    advance,
    async_load,
    barriers,
    lead_steps,
    multiply_halves,
    products,
    reinterpret,
    release,
    start_half,
    store_block,
    tensor_map_of,
)
from rlk_kernels.matmul.hopper.shares import COLUMNS, STEP, nth_tile, tile_count
from rlk_kernels.matmul.steps import tile_position

GROUP = gl.constexpr(16)
"""Row tiles that share a column tile while it is in L2."""

STORAGE_LAYOUT = gl.DistributedLinearLayout(
    reg_bases=[[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64]],
    lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
    warp_bases=[[16, 0], [32, 0]],
    block_bases=[],
    shape=[64, 128],
)
"""The layout of 128 of a row's 256 sums between two calls."""


@gluon.jit
def _copy_tiles(
    a_desc, b_desc, a_smem, b_smem, full, empty, stage, phase, M, N, K, all_tiles, heavy,
    TRANS_A: gl.constexpr,
):  # fmt: skip
    WIDTH: gl.constexpr = b_desc.block_type.shape[1]
    nbytes: gl.constexpr = 2 * a_desc.block_type.nbytes + b_desc.block_type.nbytes
    tiles = gl.cdiv(M, 2 * ROWS) * gl.cdiv(N, WIDTH)
    even, count = tile_count(tiles, all_tiles, heavy)
    for j in range(count):
        tile = nth_tile(j, even, all_tiles, heavy)
        tile_m, tile_n = tile_position(tile, M, N, 2 * ROWS, WIDTH, GROUP)
        row = tile_m * (2 * ROWS)
        col = tile_n * WIDTH
        for step in range(gl.cdiv(K, STEP)):
            k = step * STEP
            mbarrier.wait(empty.index(stage), phase)
            ready = full.index(stage)
            mbarrier.expect(ready, nbytes)
            for side in gl.static_range(2):
                into = a_smem.index(2 * stage + side)
                if TRANS_A:
                    async_load(a_desc, [k, row + side * ROWS], ready, into)
                else:
                    async_load(a_desc, [row + side * ROWS, k], ready, into)
            into = b_smem.index(stage * (b_smem.type.shape[0] // DEPTH))
            async_load(b_desc, [k, col], ready, into)
            stage += 1
            if stage == DEPTH:
                stage = 0
                phase ^= 1
    return stage, phase


@gluon.jit
def _copy_operands(
    a_desc, b_desc, a2_desc, b2_desc, a_smem, b_smem, b2_smem, full, empty, M, N, K, all_tiles,
    heavy, ahead, M2, N2, K2, TRANS_A: gl.constexpr, TRANS_A2: gl.constexpr, TWO: gl.constexpr,
):  # fmt: skip
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for turn in range(2):
        if (turn == 0) == (gl.program_id(0) >= ahead):
            stage, phase = _copy_tiles(
                a_desc, b_desc, a_smem, b_smem, full, empty, stage, phase, M, N, K, all_tiles,
                heavy, TRANS_A,
            )  # fmt: skip
        else:
            if TWO:
                tiles = gl.cdiv(M2, 2 * ROWS) * gl.cdiv(N2, b2_desc.block_type.shape[1])
                stage, phase = _copy_tiles(
                    a2_desc, b2_desc, a_smem, b2_smem, full, empty, stage, phase, M2, N2, K2,
                    tiles, 0, TRANS_A2,
                )  # fmt: skip


@gluon.jit
def _addresses(sum_ptr, row, tile_n, half_n, LAYOUT: gl.constexpr):
    """The addresses of half of the 256 sums of each row: the row's own 512 bytes of the tensor."""
    rows = (row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))).to(gl.int64)
    cols = tile_n * (COLUMNS // 2) + gl.arange(0, COLUMNS // 2, gl.SliceLayout(0, LAYOUT))
    return sum_ptr + gl.expand_dims(rows * half_n, 1) + gl.expand_dims(cols, 0)


@gluon.jit
def _store_partial(half, sum_ptr, row, tile_n, M, half_n, STORAGE: gl.constexpr):
    """Store fp32 sums in the order of the registers: an instruction stores 16 bytes a thread and 64
    bytes a row."""
    half = gl.permute(gl.reshape(half, (ROWS, 8, 2, 4, 2)), (0, 1, 3, 2, 4))
    half = gl.convert_layout(gl.reshape(half, (ROWS, COLUMNS // 2)), STORAGE, assert_trivial=True)
    inside = gl.expand_dims(row + gl.arange(0, ROWS, gl.SliceLayout(1, STORAGE)) < M, 1)
    gl.store(_addresses(sum_ptr, row, tile_n, half_n, STORAGE), half, mask=inside)


@gluon.jit
def _load_partial(sum_ptr, row, tile_n, M, half_n, LAYOUT: gl.constexpr, STORAGE: gl.constexpr):
    """Load what `_store_partial` stored."""
    inside = gl.expand_dims(row + gl.arange(0, ROWS, gl.SliceLayout(1, STORAGE)) < M, 1)
    half = gl.load(_addresses(sum_ptr, row, tile_n, half_n, STORAGE), mask=inside, other=0.0)
    half = gl.permute(gl.reshape(half, (ROWS, 8, 4, 2, 2)), (0, 1, 3, 2, 4))
    return gl.convert_layout(gl.reshape(half, (ROWS, COLUMNS // 2)), LAYOUT, assert_trivial=True)


@gluon.jit
def _initial_sums(
    sum_ptr, row, tile_n, M, half_n, FIRST: gl.constexpr, LAYOUT: gl.constexpr,
    STORAGE: gl.constexpr,
):  # fmt: skip
    """The initial sums of half a tile."""
    if FIRST:
        half = gl.zeros([ROWS, COLUMNS // 2], gl.float32, LAYOUT)
    else:
        half = _load_partial(sum_ptr, row, tile_n, M, half_n, LAYOUT, STORAGE)
    return half


@gluon.jit
def _tile_of_turn(j, even, count, all_tiles, heavy, M, N, SIDE: gl.constexpr):
    """(first row of SIDE, column tile) of this program's j-th tile; row M after the last tile."""
    tile = gl.where(j < count, nth_tile(j, even, all_tiles, heavy), 0)
    tile_m, tile_n = tile_position(tile, M, N, 2 * ROWS, COLUMNS, GROUP)
    return gl.where(j < count, (2 * tile_m + SIDE) * ROWS, M), tile_n


@gluon.jit
def _finish_rows(
    x, out_desc, out_smem, sum_ptr, scale_ptr, row, col, tile_n, M, half_n, LAST: gl.constexpr,
    SCALED: gl.constexpr, STORAGE: gl.constexpr,
):  # fmt: skip
    """Store the sums x[ROWS, :] from (row, col) on, as partial or as final sums."""
    if SCALED:
        rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, x.type.layout))
        x *= gl.expand_dims(gl.load(scale_ptr + rows, mask=rows < M, other=0.0), 1)
    if LAST:
        store_block(x, out_desc, out_smem, row, col)
    else:
        _store_partial(x, sum_ptr, row, tile_n, M, half_n, STORAGE)


@gluon.jit
def _multiply_narrow_tiles(
    out_desc, a_smem, b_smem, out_smem, full, empty, scale_ptr, stage, phase, M, N, K, all_tiles,
    heavy, TRANS_A: gl.constexpr, SCALED: gl.constexpr, SIDE: gl.constexpr,
):  # fmt: skip
    """Compute tiles of fewer than COLUMNS columns, without partial sums."""
    WIDTH: gl.constexpr = b_smem.type.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    even, count = tile_count(gl.cdiv(M, 2 * ROWS) * gl.cdiv(N, WIDTH), all_tiles, heavy)
    for j in range(count):
        tile = nth_tile(j, even, all_tiles, heavy)
        tile_m, tile_n = tile_position(tile, M, N, 2 * ROWS, WIDTH, GROUP)
        acc = gl.zeros([ROWS, WIDTH], gl.float32, layout)
        acc, stage, phase = products(
            acc, a_smem, b_smem, full, empty, stage, phase, gl.cdiv(K, STEP), TRANS_A, False, STEP,
            WIDTH, SIDE,
        )  # fmt: skip
        row = (2 * tile_m + SIDE) * ROWS
        _finish_rows(
            acc, out_desc, out_smem, None, scale_ptr, row, tile_n * WIDTH, tile_n, M, 0, True,
            SCALED, None,
        )  # fmt: skip
    return stage, phase


@gluon.jit
def _multiply_tiles(
    out_desc, a_smem, b_smem, out_smem, full, empty, hi_ptr, lo_ptr, scale_ptr, stage, phase,
    M, N, K, half_n, all_tiles, heavy,
    TRANS_A: gl.constexpr, FIRST: gl.constexpr, LAST: gl.constexpr, SCALED: gl.constexpr,
    LEAD: gl.constexpr, STORAGE: gl.constexpr, SIDE: gl.constexpr,
):  # fmt: skip
    """Compute tiles of COLUMNS columns; the left half is LEAD steps ahead of the right half."""
    C: gl.constexpr = COLUMNS // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    even, count = tile_count(gl.cdiv(M, 2 * ROWS) * gl.cdiv(N, COLUMNS), all_tiles, heavy)
    row, tile_n = _tile_of_turn(0, even, count, all_tiles, heavy, M, N, SIDE)
    left = _initial_sums(hi_ptr, row, tile_n, M, half_n, FIRST, layout, STORAGE)
    right = gl.zeros([ROWS, C], gl.float32, layout)
    before = M  # there is no earlier tile: rows from M on are not stored
    before_n = 0
    for j in range(count):
        left, right = start_half(
            left, right, a_smem, b_smem, full, empty, stage, phase, 0, 0, False, LEAD, TRANS_A,
            False, STEP, COLUMNS, SIDE,
        )  # fmt: skip
        _finish_rows(
            right, out_desc, out_smem, lo_ptr, scale_ptr, before, before_n * COLUMNS + C,
            before_n, M, half_n, LAST, SCALED, STORAGE,
        )  # fmt: skip
        right = _initial_sums(lo_ptr, row, tile_n, M, half_n, FIRST, layout, STORAGE)
        right, left = start_half(
            right, left, a_smem, b_smem, full, empty, stage, phase, 0, 0, True, LEAD, TRANS_A,
            False, STEP, COLUMNS, SIDE,
        )  # fmt: skip
        left, right, stage, phase = multiply_halves(
            left, right, a_smem, b_smem, full, empty, stage, phase, gl.cdiv(K, STEP), LEAD,
            TRANS_A, False, STEP, COLUMNS, SIDE,
        )  # fmt: skip
        if row < M:  # nearly always true; without it the compiler moves the other wait here
            _finish_rows(
                left, out_desc, out_smem, hi_ptr, scale_ptr, row, tile_n * COLUMNS, tile_n, M,
                half_n, LAST, SCALED, STORAGE,
            )  # fmt: skip
        before = row
        before_n = tile_n
        row, tile_n = _tile_of_turn(j + 1, even, count, all_tiles, heavy, M, N, SIDE)
        left = _initial_sums(hi_ptr, row, tile_n, M, half_n, FIRST, layout, STORAGE)
        right = warpgroup_mma_wait(0, [right])
        release(empty, stage, LEAD)
        stage, phase = advance(stage, phase, LEAD)
    _finish_rows(
        right, out_desc, out_smem, lo_ptr, scale_ptr, before, before_n * COLUMNS + C, before_n, M,
        half_n, LAST, SCALED, STORAGE,
    )  # fmt: skip
    return stage, phase


@gluon.jit
def _multiply(
    a_smem, b_smem, b2_smem, out_smem, full, empty, out_desc, hi_ptr, lo_ptr, scale_ptr,
    out2_desc, hi2_ptr, lo2_ptr, scale2_ptr, M, N, K, half_n, all_tiles, heavy, ahead, M2,
    N2, K2, half_n2,
    TRANS_A: gl.constexpr, FIRST: gl.constexpr, LAST: gl.constexpr, SCALED: gl.constexpr,
    LEAD: gl.constexpr, TRANS_A2: gl.constexpr, FIRST2: gl.constexpr, LAST2: gl.constexpr,
    SCALED2: gl.constexpr, LEAD2: gl.constexpr, TWO: gl.constexpr, STORAGE: gl.constexpr,
    SIDE: gl.constexpr,
):  # fmt: skip
    """Multiply 64 rows of every tile of this program, with four warps."""
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for turn in range(2):
        if (turn == 0) == (gl.program_id(0) >= ahead):
            stage, phase = _multiply_tiles(
                out_desc, a_smem, b_smem, out_smem, full, empty, hi_ptr, lo_ptr, scale_ptr,
                stage, phase, M, N, K, half_n, all_tiles, heavy,
                TRANS_A, FIRST, LAST, SCALED, LEAD, STORAGE, SIDE,
            )  # fmt: skip
        else:
            if TWO:
                WIDTH: gl.constexpr = b2_smem.type.shape[2]
                tiles = gl.cdiv(M2, 2 * ROWS) * gl.cdiv(N2, WIDTH)
                if WIDTH == COLUMNS:
                    stage, phase = _multiply_tiles(
                        out2_desc, a_smem, b2_smem, out_smem, full, empty, hi2_ptr, lo2_ptr,
                        scale2_ptr, stage, phase, M2, N2, K2, half_n2, tiles, 0,
                        TRANS_A2, FIRST2, LAST2, SCALED2, LEAD2, STORAGE, SIDE,
                    )  # fmt: skip
                else:
                    stage, phase = _multiply_narrow_tiles(
                        out2_desc, a_smem, b2_smem, out_smem, full, empty, scale2_ptr, stage,
                        phase, M2, N2, K2, tiles, 0, TRANS_A2, SCALED2, SIDE,
                    )  # fmt: skip
    if LAST or LAST2:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "K", "all_tiles", "heavy", "ahead", "M2", "K2"])
def _sum_hopper_kernel(
    a_desc, b_desc, out_desc, hi_ptr, lo_ptr, scale_ptr, M, N, K, half_n,
    all_tiles, heavy, ahead,
    a2_desc, b2_desc, out2_desc, hi2_ptr, lo2_ptr, scale2_ptr, M2, N2, K2, half_n2,
    TRANS_A: gl.constexpr, FIRST: gl.constexpr, LAST: gl.constexpr, SCALED: gl.constexpr,
    LEAD: gl.constexpr, TRANS_A2: gl.constexpr, FIRST2: gl.constexpr, LAST2: gl.constexpr,
    SCALED2: gl.constexpr, LEAD2: gl.constexpr, TWO: gl.constexpr, STORAGE: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = a_desc.dtype
    a_smem = gl.allocate_shared_memory(dtype, [2 * DEPTH, ROWS, STEP], a_desc.layout)
    b_smem = gl.allocate_shared_memory(dtype, [DEPTH, STEP, COLUMNS], b_desc.layout)
    b2_smem = b_smem
    if TWO:
        WIDTH: gl.constexpr = b2_desc.block_type.shape[1]
        b2_smem = reinterpret(
            b_smem, dtype, [COLUMNS // WIDTH * DEPTH, STEP, WIDTH], b2_desc.layout
        )
    out_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS // 2], dtype)
    out_smem = gl.allocate_shared_memory(dtype, [2, ROWS, COLUMNS // 2], out_layout)
    full, empty = barriers(DEPTH, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                a_smem, b_smem, b2_smem, out_smem.index(0), full, empty, out_desc, hi_ptr,
                lo_ptr, scale_ptr, out2_desc, hi2_ptr, lo2_ptr, scale2_ptr, M, N, K, half_n,
                all_tiles, heavy, ahead, M2, N2, K2, half_n2, TRANS_A, FIRST, LAST, SCALED, LEAD,
                TRANS_A2, FIRST2, LAST2, SCALED2, LEAD2, TWO, STORAGE, 0,
            )),
            (_multiply, (
                a_smem, b_smem, b2_smem, out_smem.index(1), full, empty, out_desc, hi_ptr,
                lo_ptr, scale_ptr, out2_desc, hi2_ptr, lo2_ptr, scale2_ptr, M, N, K, half_n,
                all_tiles, heavy, ahead, M2, N2, K2, half_n2, TRANS_A, FIRST, LAST, SCALED, LEAD,
                TRANS_A2, FIRST2, LAST2, SCALED2, LEAD2, TWO, STORAGE, 1,
            )),
            (_copy_operands, (
                a_desc, b_desc, a2_desc, b2_desc, a_smem, b_smem, b2_smem, full, empty, M, N, K,
                all_tiles, heavy, ahead, M2, N2, K2, TRANS_A, TRANS_A2, TWO,
            )),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


def sum_hopper(plan: AccumulatePlan, partials: tuple[PartialProduct, ...]) -> None:
    """Launch the slices of a plan's shared launch: 16-bit outputs with N a multiple of 256."""
    shared = plan.shared
    assert shared is not None
    mine = [(partials[i], plan.slices[i].width) for i in shared.order]
    arguments: list = []
    for x, width in mine:
        (m, n), k, stored = x.out.shape, x.b.shape[0], not (x.first and x.last)
        arguments += [
            tensor_map_of(x.a, [STEP.value, ROWS.value]),
            tensor_map_of(x.b, [STEP.value, width]),
            tensor_map_of(x.out, [ROWS.value, COLUMNS.value // 2]) if x.last else None,
            x.out.view(torch.float32) if stored else None,
            x.lo.view(torch.float32) if stored else None,
            x.scale, m, n, k, n // 2,
        ]  # fmt: skip
        arguments += [shared.everyone, shared.heavy, shared.ahead] if len(arguments) == 10 else []
    flags = [
        (x.trans_a, x.first, x.last, x.scale is not None, lead_steps(x.b.shape[0], STEP.value))
        for x, _ in mine
    ]
    if len(mine) == 1:
        arguments += [None] * 10
        flags.append((False, False, False, False, 0))
    launch(
        None, _sum_hopper_kernel, (shared.programs, 1, 1),
        (*arguments, *flags[0], *flags[1], len(mine) == 2, STORAGE_LAYOUT),
        {"num_warps": 4, "maxnreg": 168},
    )  # fmt: skip


def stored_partials(x: PartialProduct) -> Tensor:
    """[M, 256]: the partial sums that `sum_hopper` stored in x.out and x.lo, in column order."""
    halves = []
    for stored in (x.out, x.lo):
        half = stored.view(torch.float32).unflatten(1, (8, 4, 2, 2))
        halves.append(half.permute(0, 1, 3, 2, 4).flatten(1))
    return torch.cat(halves, 1)
