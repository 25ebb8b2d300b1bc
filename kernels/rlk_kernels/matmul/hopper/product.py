"""The product of `kernels.py` with copies and products apart, for Hopper: same order and bits.

A warp copies A and B (TMA) as fast as buffers come free; each group of four warps multiplies its 64
rows of the tile and waits for nobody but that warp. One of the operands has the 64 rows of a group,
the tall one: A, or B where the tile is swapped. The other one, the flat one, is shared by all
groups and may have up to three widths side by side, for a tile's other side need not be a power of
two. Where the output is not whole tiles, its tiles lie evenly and overlap: a program that had fewer
rows to copy would run ahead, and what it reads be out of L2 when its neighbours come (up to a third
of the time at long K). What two programs make has the same bits.
K from front to back into one fp32 accumulator: not split (`split.py`). Only A @ B^T, as `linear`
has it. Written in Gluon, which ships with Triton.
"""

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

from rlk_kernels.launching import launch
from rlk_kernels.matmul.hopper.pipeline import (
    ROWS,
    async_load,
    async_store,
    barriers,
    described,
    reinterpret,
)
from rlk_kernels.matmul.plan import MatmulPlan
from rlk_kernels.matmul.tile import evenly

AT_LAUNCH = {1: None, 2: 168, 3: 128, 4: 96}
"""Groups -> registers a thread at the launch: with the copying warp's group, all that there are."""


@gluon.jit
def _copy_operands(
    copied, FLAT: gl.constexpr, FLAT2: gl.constexpr, FLAT3: gl.constexpr, BK: gl.constexpr,
    DEPTH: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    tall_desc, flat_desc, flat2_desc, flat3_desc = copied[:4]
    tall_smem, flat_smem, flat2_smem, flat3_smem, full, empty, tall, flat, K = copied[4:]
    nbytes: gl.constexpr = (
        GROUPS * tall_desc.block_type.nbytes
        + flat_desc.block_type.nbytes
        + (flat2_desc.block_type.nbytes if FLAT2 else 0)
        + (flat3_desc.block_type.nbytes if FLAT3 else 0)
    )
    for step in range(gl.cdiv(K, BK)):
        stage = step % DEPTH
        mbarrier.wait(empty.index(stage), (step // DEPTH & 1) ^ 1)
        ready = full.index(stage)
        mbarrier.expect(ready, nbytes)
        k = step * BK
        for group in gl.static_range(GROUPS):
            where = tall_smem.index(group * DEPTH + stage)
            async_load(tall_desc, [tall + group * ROWS, k], ready, where)
        async_load(flat_desc, [flat, k], ready, flat_smem.index(stage))
        if FLAT2 > 0:
            async_load(flat2_desc, [flat + FLAT, k], ready, flat2_smem.index(stage))
        if FLAT3 > 0:
            async_load(flat3_desc, [flat + FLAT + FLAT2, k], ready, flat3_smem.index(stage))


@gluon.jit
def _store(
    acc, c_desc, c_smem, c_ptr, bias_ptr, tall, flat, M, N, stride_cm, HAS_BIAS: gl.constexpr,
    SWAP: gl.constexpr, STAGED: gl.constexpr,
):  # fmt: skip
    talls = tall + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
    flats = flat + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    if HAS_BIAS:
        if SWAP:
            bias = gl.load(bias_ptr + talls, mask=talls < N, other=0.0).to(gl.float32)
            acc = acc + gl.expand_dims(bias, 1)
        else:
            bias = gl.load(bias_ptr + flats, mask=flats < N, other=0.0).to(gl.float32)
            acc = acc + gl.expand_dims(bias, 0)
    c = acc.to(c_ptr.dtype.element_ty)
    if STAGED:
        if SWAP:
            c_smem.permute((1, 0)).store(c)
            fence_async_shared()
            async_store(c_desc, [flat, tall], c_smem)
        else:
            c_smem.store(c)
            fence_async_shared()
            async_store(c_desc, [tall, flat], c_smem)
    else:
        rows = gl.expand_dims(talls, 1)
        cols = gl.expand_dims(flats, 0)
        if SWAP:
            where = c_ptr + cols.to(gl.int64) * stride_cm + rows
            gl.store(where, c, mask=(cols < M) & (rows < N))
        else:
            where = c_ptr + rows.to(gl.int64) * stride_cm + cols
            gl.store(where, c, mask=(rows < M) & (cols < N))


@gluon.jit
def _zeros(FLAT: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FLAT, 16])
    return gl.zeros([ROWS, FLAT], gl.float32, layout)


@gluon.jit
def _sums_from_memory(
    acc, acc2, acc3, tall_smem, flat_smem, flat2_smem, flat3_smem, full, empty, K,
    FLAT2: gl.constexpr, FLAT3: gl.constexpr, BK: gl.constexpr, DEPTH: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """The products of a group, both operands out of shared memory; a step runs ahead."""
    for step in range(gl.cdiv(K, BK)):
        stage = step % DEPTH
        mbarrier.wait(full.index(stage), step // DEPTH & 1)
        a = tall_smem.index(GROUP * DEPTH + stage)
        first = warpgroup_mma(a, flat_smem.index(stage).permute((1, 0)), acc, is_async=True)
        if FLAT3 > 0:
            second = warpgroup_mma(a, flat2_smem.index(stage).permute((1, 0)), acc2, is_async=True)
            third = warpgroup_mma(a, flat3_smem.index(stage).permute((1, 0)), acc3, is_async=True)
            acc, acc2, acc3 = warpgroup_mma_wait(3, [first, second, third])
        elif FLAT2 > 0:
            second = warpgroup_mma(a, flat2_smem.index(stage).permute((1, 0)), acc2, is_async=True)
            acc, acc2 = warpgroup_mma_wait(2, [first, second])
        else:
            acc = warpgroup_mma_wait(1, [first])
        # the step before is through: its buffers are free
        mbarrier.arrive(empty.index((step + DEPTH - 1) % DEPTH), count=1, pred=step > 0)
    if FLAT3 > 0:
        acc, acc2, acc3 = warpgroup_mma_wait(0, [acc, acc2, acc3])
    elif FLAT2 > 0:
        acc, acc2 = warpgroup_mma_wait(0, [acc, acc2])
    else:
        acc = warpgroup_mma_wait(0, [acc])
    return acc, acc2, acc3


@gluon.jit
def _as_left(a, acc):
    """`a` as the left operand of another width: the same registers."""
    layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    return gl.convert_layout(a, layout, assert_trivial=True)


@gluon.jit
def _sums_from_registers(
    acc, acc2, acc3, tall_smem, flat_smem, flat2_smem, flat3_smem, full, empty, K,
    FLAT3: gl.constexpr, BK: gl.constexpr, DEPTH: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """`_sums_from_memory` of several widths, the tall operand read once a step for all of them: a
    narrow width takes no longer than its products. Other groups multiply while this one is between
    two steps."""
    layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    steps = gl.cdiv(K, BK)
    mbarrier.wait(full.index(0), 0)
    a = tall_smem.index(GROUP * DEPTH).load(layout)
    for step in range(steps):
        stage = step % DEPTH
        first = warpgroup_mma(a, flat_smem.index(stage).permute((1, 0)), acc, is_async=True)
        second = warpgroup_mma(
            _as_left(a, acc2), flat2_smem.index(stage).permute((1, 0)), acc2, is_async=True
        )
        if FLAT3 > 0:
            third = warpgroup_mma(
                _as_left(a, acc3), flat3_smem.index(stage).permute((1, 0)), acc3, is_async=True
            )
        after = gl.minimum(step + 1, steps - 1)
        mbarrier.wait(full.index(after % DEPTH), after // DEPTH & 1)
        ahead = tall_smem.index(GROUP * DEPTH + after % DEPTH).load(layout)
        # `a` too: what products read must stay until they are through
        if FLAT3 > 0:
            acc, acc2, acc3, a = warpgroup_mma_wait(0, [first, second, third, a])
        else:
            acc, acc2, a = warpgroup_mma_wait(0, [first, second, a])
        mbarrier.arrive(empty.index(stage), count=1)
        a = ahead
    return acc, acc2, acc3


@gluon.jit
def _multiply(
    made, FLAT: gl.constexpr, FLAT2: gl.constexpr, FLAT3: gl.constexpr, BK: gl.constexpr,
    DEPTH: gl.constexpr, HAS_BIAS: gl.constexpr, SWAP: gl.constexpr, STAGED: gl.constexpr,
    REGISTERS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Four warps: 64 rows of the tall operand."""
    c_desc, c2_desc, c3_desc, tall_smem, flat_smem, flat2_smem, flat3_smem = made[:7]
    c_smem, c2_smem, c3_smem, full, empty, c_ptr, bias_ptr, tall, flat, M, N, K = made[7:19]
    stride_cm = made[19]
    acc = _zeros(FLAT)
    acc2 = acc
    acc3 = acc
    if FLAT2 > 0:
        acc2 = _zeros(FLAT2)
    if FLAT3 > 0:
        acc3 = _zeros(FLAT3)
    if REGISTERS:
        acc, acc2, acc3 = _sums_from_registers(
            acc, acc2, acc3, tall_smem, flat_smem, flat2_smem, flat3_smem, full, empty, K, FLAT3,
            BK, DEPTH, GROUP,
        )  # fmt: skip
    else:
        acc, acc2, acc3 = _sums_from_memory(
            acc, acc2, acc3, tall_smem, flat_smem, flat2_smem, flat3_smem, full, empty, K, FLAT2,
            FLAT3, BK, DEPTH, GROUP,
        )  # fmt: skip
    tall += GROUP * ROWS
    # this group's rows of the tall operand have been read, all of them: room for its output
    slot: gl.constexpr = (GROUP * DEPTH * BK + FLAT - 1) // FLAT
    first_c = c_smem
    second_c = c2_smem
    third_c = c3_smem
    if STAGED:
        first_c = c_smem.index(slot)
        if FLAT2 > 0:
            second_c = c2_smem.index((slot + 1) * FLAT // FLAT2)
        if FLAT3 > 0:
            third_c = c3_smem.index(((slot + 1) * FLAT + FLAT2) // FLAT3)
    _store(
        acc, c_desc, first_c, c_ptr, bias_ptr, tall, flat, M, N, stride_cm, HAS_BIAS, SWAP, STAGED,
    )  # fmt: skip
    if FLAT2 > 0:
        _store(
            acc2, c2_desc, second_c, c_ptr, bias_ptr, tall, flat + FLAT, M, N, stride_cm, HAS_BIAS,
            SWAP, STAGED,
        )  # fmt: skip
    if FLAT3 > 0:
        _store(
            acc3, c3_desc, third_c, c_ptr, bias_ptr, tall, flat + FLAT + FLAT2, M, N, stride_cm,
            HAS_BIAS, SWAP, STAGED,
        )  # fmt: skip
    if STAGED:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "rows_apart", "columns_apart"])
def _gemm_hopper_kernel(
    tall_desc, flat_desc, flat2_desc, flat3_desc, c_desc, c2_desc, c3_desc, c_ptr, bias_ptr, M, N,
    K, rows_apart, columns_apart, stride_cm, FLAT: gl.constexpr, FLAT2: gl.constexpr,
    FLAT3: gl.constexpr, BK: gl.constexpr, GROUPS: gl.constexpr, ORDER: gl.constexpr,
    DEPTH: gl.constexpr, HAS_BIAS: gl.constexpr, SWAP: gl.constexpr, STAGED: gl.constexpr,
    REGISTERS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = tall_desc.dtype
    tall_smem = gl.allocate_shared_memory(dtype, [GROUPS * DEPTH, ROWS, BK], tall_desc.layout)
    flat_smem = gl.allocate_shared_memory(dtype, [DEPTH, FLAT, BK], flat_desc.layout)
    flat2_smem = flat_smem
    if FLAT2 > 0:
        flat2_smem = gl.allocate_shared_memory(dtype, [DEPTH, FLAT2, BK], flat2_desc.layout)
    flat3_smem = flat_smem
    if FLAT3 > 0:
        flat3_smem = gl.allocate_shared_memory(dtype, [DEPTH, FLAT3, BK], flat3_desc.layout)
    c_smem = tall_smem
    c2_smem = tall_smem
    c3_smem = tall_smem
    if STAGED:
        room: gl.constexpr = GROUPS * DEPTH * BK
        shape: gl.constexpr = c_desc.block_type.shape
        c_smem = reinterpret(
            tall_smem, c_desc.dtype, [room // FLAT, shape[0], shape[1]], c_desc.layout
        )
        if FLAT2 > 0:
            shape2: gl.constexpr = c2_desc.block_type.shape
            c2_smem = reinterpret(
                tall_smem, c_desc.dtype, [room // FLAT2, shape2[0], shape2[1]], c2_desc.layout
            )
        if FLAT3 > 0:
            shape3: gl.constexpr = c3_desc.block_type.shape
            c3_smem = reinterpret(
                tall_smem, c_desc.dtype, [room // FLAT3, shape3[0], shape3[1]], c3_desc.layout
            )
    full, empty = barriers(DEPTH, GROUPS)
    fence_async_shared()
    if OVERLAP > 0:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    if OVERLAP == 1:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
    # some ORDER row tiles share a column tile while it is in L2 (see `steps._tile_position`)
    columns_apart *= 8  # so that it is known to be a multiple
    tiles_m = gl.cdiv(M, rows_apart)
    order = gl.cdiv(tiles_m, gl.maximum((tiles_m + ORDER // 2) // ORDER, 1))
    per_order = order * gl.cdiv(N, columns_apart)
    start = gl.program_id(0) // per_order * order
    size = gl.minimum(tiles_m - start, order)
    within = gl.program_id(0) % per_order
    row = (start + within % size) * rows_apart
    col = within // size * columns_apart
    tall = row
    flat = col
    if SWAP:
        tall = col
        flat = row
    copied = (
        tall_desc, flat_desc, flat2_desc, flat3_desc, tall_smem, flat_smem, flat2_smem, flat3_smem,
        full, empty, tall, flat, K,
    )  # fmt: skip
    made = (
        c_desc, c2_desc, c3_desc, tall_smem, flat_smem, flat2_smem, flat3_smem, c_smem, c2_smem,
        c3_smem, full, empty, c_ptr, bias_ptr, tall, flat, M, N, K, stride_cm,
    )  # fmt: skip
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (
                    made, FLAT, FLAT2, FLAT3, BK, DEPTH, HAS_BIAS, SWAP, STAGED, REGISTERS, 0,
                )),
                (_copy_operands, (copied, FLAT, FLAT2, FLAT3, BK, DEPTH, GROUPS)),
            ],
            [1], [24],
        )  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (
                    made, FLAT, FLAT2, FLAT3, BK, DEPTH, HAS_BIAS, SWAP, STAGED, REGISTERS, 0,
                )),
                (_multiply, (
                    made, FLAT, FLAT2, FLAT3, BK, DEPTH, HAS_BIAS, SWAP, STAGED, REGISTERS, 1,
                )),
                (_copy_operands, (copied, FLAT, FLAT2, FLAT3, BK, DEPTH, GROUPS)),
            ],
            [4, 1], [232, 24],
        )  # fmt: skip
    elif GROUPS == 3:
        gl.warp_specialize(
            [
                (_multiply, (
                    made, FLAT, FLAT2, FLAT3, BK, DEPTH, HAS_BIAS, SWAP, STAGED, REGISTERS, 0,
                )),
                (_multiply, (
                    made, FLAT, FLAT2, FLAT3, BK, DEPTH, HAS_BIAS, SWAP, STAGED, REGISTERS, 1,
                )),
                (_multiply, (
                    made, FLAT, FLAT2, FLAT3, BK, DEPTH, HAS_BIAS, SWAP, STAGED, REGISTERS, 2,
                )),
                (_copy_operands, (copied, FLAT, FLAT2, FLAT3, BK, DEPTH, GROUPS)),
            ],
            [4, 4, 1], [160, 160, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    made, FLAT, FLAT2, FLAT3, BK, DEPTH, HAS_BIAS, SWAP, STAGED, REGISTERS, 0,
                )),
                (_multiply, (
                    made, FLAT, FLAT2, FLAT3, BK, DEPTH, HAS_BIAS, SWAP, STAGED, REGISTERS, 1,
                )),
                (_multiply, (
                    made, FLAT, FLAT2, FLAT3, BK, DEPTH, HAS_BIAS, SWAP, STAGED, REGISTERS, 2,
                )),
                (_multiply, (
                    made, FLAT, FLAT2, FLAT3, BK, DEPTH, HAS_BIAS, SWAP, STAGED, REGISTERS, 3,
                )),
                (_copy_operands, (copied, FLAT, FLAT2, FLAT3, BK, DEPTH, GROUPS)),
            ],
            [4, 4, 4, 1], [112, 112, 112, 24],
        )  # fmt: skip


def specialized_product(
    plan: MatmulPlan, seen: dict, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """out[M, N] = a[M, K] @ b[N, K]^T (+ bias[N]), a program a tile."""
    (m, n), tile = out.shape, plan.tile
    tall, flat, groups, width = a, b, tile.m // ROWS.value, tile.n
    if tile.swap:
        tall, flat, groups, width = b, a, tile.n // ROWS.value, tile.m
    widths = (width, tile.n2, tile.n3)
    maps = [described(flat, [some, tile.k]) if some else flat for some in widths]
    for some in widths:
        box = [some, ROWS.value] if tile.swap else [ROWS.value, some]
        maps.append(described(out, box) if plan.tma_store and some else out)
    apart = evenly(m, tile.rows), evenly(n, tile.columns, 16) // 8
    launch(
        seen, _gemm_hopper_kernel, (plan.programs, 1, 1),
        (described(tall, [ROWS.value, tile.k]), *maps, out, bias, m, n, a.shape[1], *apart,
         out.stride(0), *widths, tile.k, groups, tile.group, plan.stages, bias is not None,
         tile.swap, plan.tma_store, tile.registers, plan.overlap),
        {"num_warps": 4, "launch_pdl": plan.overlap > 0, "maxnreg": AT_LAUNCH[groups]},
    )  # fmt: skip
