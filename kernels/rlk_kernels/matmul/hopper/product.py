"""The product of `kernels.py` for one wave of tiles on Hopper: same order and bits, other schedule.

A warp copies A and B (TMA) as fast as buffers come free; each group of four warps multiplies 64
rows of the tile and waits for nobody but that warp. K from front to back into one fp32 accumulator:
not split (`split.py`). Only A @ B^T, as `linear` has it. Written in Gluon, which ships
with Triton.
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
from rlk_kernels.matmul.hopper.pipeline import ROWS, async_load, async_store, barriers, described
from rlk_kernels.matmul.plan import MatmulPlan


@gluon.jit
def _copy_operands(
    a_desc, b_desc, b2_desc, a_smem, b_smem, b2_smem, full, empty, row, col, K,
    BN: gl.constexpr, BK: gl.constexpr, DEPTH: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    nbytes: gl.constexpr = (
        GROUPS * a_desc.block_type.nbytes + b_desc.block_type.nbytes + b2_desc.block_type.nbytes
    )
    for step in range(gl.cdiv(K, BK)):
        stage = step % DEPTH
        mbarrier.wait(empty.index(stage), (step // DEPTH & 1) ^ 1)
        ready = full.index(stage)
        mbarrier.expect(ready, nbytes)
        k = step * BK
        for group in gl.static_range(GROUPS):
            async_load(a_desc, [row + group * ROWS, k], ready, a_smem.index(stage * GROUPS + group))
        async_load(b_desc, [col, k], ready, b_smem.index(stage))
        async_load(b2_desc, [col + BN, k], ready, b2_smem.index(stage))


@gluon.jit
def _store(acc, c_desc, c_smem, bias_ptr, row, col, N, HAS_BIAS: gl.constexpr):
    if HAS_BIAS:
        cols = col + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        bias = gl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(gl.float32)
        acc = acc + gl.expand_dims(bias, 0)
    c_smem.store(acc.to(c_desc.dtype))
    fence_async_shared()
    async_store(c_desc, [row, col], c_smem)


@gluon.jit
def _multiply(
    c_desc, c2_desc, a_smem, b_smem, b2_smem, c_smem, c2_smem, full, empty, bias_ptr, row, col,
    N, K, BN: gl.constexpr, BN2: gl.constexpr, BK: gl.constexpr, DEPTH: gl.constexpr,
    GROUPS: gl.constexpr, HAS_BIAS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Four warps: 64 rows of the tile."""
    acc = gl.zeros([ROWS, BN], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16]))
    acc2 = gl.zeros(
        [ROWS, BN2], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN2, 16])
    )
    for step in range(gl.cdiv(K, BK)):
        stage = step % DEPTH
        mbarrier.wait(full.index(stage), step // DEPTH & 1)
        a = a_smem.index(stage * GROUPS + GROUP)
        first = warpgroup_mma(a, b_smem.index(stage).permute((1, 0)), acc, is_async=True)
        second = warpgroup_mma(a, b2_smem.index(stage).permute((1, 0)), acc2, is_async=True)
        acc, acc2 = warpgroup_mma_wait(2, [first, second])
        # the step before is through: its buffers are free
        mbarrier.arrive(empty.index((step + DEPTH - 1) % DEPTH), count=1, pred=step > 0)
    acc, acc2 = warpgroup_mma_wait(0, [acc, acc2])
    row += GROUP * ROWS
    _store(acc, c_desc, c_smem.index(GROUP), bias_ptr, row, col, N, HAS_BIAS)
    _store(acc2, c2_desc, c2_smem.index(GROUP), bias_ptr, row, col + BN, N, HAS_BIAS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def _gemm_hopper_kernel(
    a_desc, b_desc, b2_desc, c_desc, c2_desc, bias_ptr, M, N, K,
    BN: gl.constexpr, BN2: gl.constexpr, BK: gl.constexpr, GROUPS: gl.constexpr,
    ORDER: gl.constexpr, DEPTH: gl.constexpr, HAS_BIAS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = a_desc.dtype
    a_smem = gl.allocate_shared_memory(dtype, [DEPTH * GROUPS, ROWS, BK], a_desc.layout)
    b_smem = gl.allocate_shared_memory(dtype, [DEPTH, BN, BK], b_desc.layout)
    b2_smem = gl.allocate_shared_memory(dtype, [DEPTH, BN2, BK], b2_desc.layout)
    c_smem = gl.allocate_shared_memory(c_desc.dtype, [GROUPS, ROWS, BN], c_desc.layout)
    c2_smem = gl.allocate_shared_memory(c2_desc.dtype, [GROUPS, ROWS, BN2], c2_desc.layout)
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
    # ORDER row tiles share a column tile while it is in L2 (see `steps._tile_position`)
    tiles_m = gl.cdiv(M, GROUPS * ROWS)
    per_order = ORDER * gl.cdiv(N, BN + BN2)
    start = gl.program_id(0) // per_order * ORDER
    size = gl.minimum(tiles_m - start, ORDER)
    within = gl.program_id(0) % per_order
    row = (start + within % size) * (GROUPS * ROWS)
    col = within // size * (BN + BN2)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (
                    c_desc, c2_desc, a_smem, b_smem, b2_smem, c_smem, c2_smem, full, empty,
                    bias_ptr, row, col, N, K, BN, BN2, BK, DEPTH, GROUPS, HAS_BIAS, 0,
                )),
                (_copy_operands, (
                    a_desc, b_desc, b2_desc, a_smem, b_smem, b2_smem, full, empty, row, col, K,
                    BN, BK, DEPTH, GROUPS,
                )),
            ],
            [1], [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    c_desc, c2_desc, a_smem, b_smem, b2_smem, c_smem, c2_smem, full, empty,
                    bias_ptr, row, col, N, K, BN, BN2, BK, DEPTH, GROUPS, HAS_BIAS, 0,
                )),
                (_multiply, (
                    c_desc, c2_desc, a_smem, b_smem, b2_smem, c_smem, c2_smem, full, empty,
                    bias_ptr, row, col, N, K, BN, BN2, BK, DEPTH, GROUPS, HAS_BIAS, 1,
                )),
                (_copy_operands, (
                    a_desc, b_desc, b2_desc, a_smem, b_smem, b2_smem, full, empty, row, col, K,
                    BN, BK, DEPTH, GROUPS,
                )),
            ],
            [4, 1], [232, 24],
        )  # fmt: skip


def one_wave(
    plan: MatmulPlan, seen: dict, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """out[M, N] = a[M, K] @ b[N, K]^T (+ bias[N]); a tile of 64 or 128 rows and n + n2 columns."""
    (m, n), tile = out.shape, plan.tile
    launch(
        seen, _gemm_hopper_kernel, (plan.programs, 1, 1), described(a, [ROWS.value, tile.k]),
        described(b, [tile.n, tile.k]),
        described(b, [tile.n2, tile.k]), described(out, [ROWS.value, tile.n]),
        described(out, [ROWS.value, tile.n2]), bias, m, n, a.shape[1],
        tile.n, tile.n2, tile.k, tile.m // ROWS.value, tile.group, plan.stages,
        bias is not None, plan.overlap, num_warps=4, launch_pdl=plan.overlap > 0,
        maxnreg=168 if tile.m > ROWS.value else None,
    )  # fmt: skip
