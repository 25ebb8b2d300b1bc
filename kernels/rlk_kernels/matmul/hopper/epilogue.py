"""The product with an epilogue (`matmul/epilogue.py`) on Hopper: the same bits, another schedule.

One warp copies h and w (TMA) as fast as buffers become free, and continues with the next tile. Two
groups of four warps multiply 64 rows of the tile each, with K from front to back in fp32
accumulators, and wait only for that warp. The left half of a tile's columns is ahead of the right
half at both ends of K (`pipeline.lead_steps`) and of each segment (`split.py`). So the epilogue of
the left half runs beside the last products of the right half, and the epilogue of the right half
beside the first products of the next tile or segment. Written in Gluon, which ships with Triton.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rlk_kernels.launching import ShapeCache, cdiv, launch, tensor_map
from rlk_kernels.matmul.epilogue import (
    EXPONENTIALS,
    GRADIENT,
    LOGITS,
    MODES,
    STATS,
    column_at,
    final_logits,
    reference_exponent,
    softcap_slope,
    tile_gradient,
)
from rlk_kernels.matmul.hopper.pipeline import (
    DEPTH,
    ROWS,
    advance,
    async_load,
    barriers,
    lead_steps,
    multiply_halves,
    release,
    shared_layout,
    start_half,
    store_block,
    tensor_map_of,
)
from rlk_kernels.matmul.hopper.split import carry_high, no_high, whole_sum
from rlk_kernels.matmul.plan import EpiloguePlan, MatmulPlan
from rlk_kernels.matmul.split import SEGMENT_UNIT
from rlk_kernels.matmul.steps import tile_position
from rlk_kernels.numerics.lse_tree.kernels import (
    LEAF_COLUMNS,
    NO_COLUMNS,
    leaf_stats,
    merge_neighbours,
    pow2,
)
from rlk_kernels.numerics.lse_tree.tree import LEAF, levels


@gluon.jit
def _copy_operands(
    h_desc, w_desc, h_smem, w_smem, full, empty, T, V, K,
    BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
    PERMUTED: gl.constexpr,
):  # fmt: skip
    nbytes: gl.constexpr = 2 * h_desc.block_type.nbytes + w_desc.block_type.nbytes
    tiles = gl.cdiv(T, 2 * ROWS) * gl.cdiv(V, BN)
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        tile_m, tile_n = tile_position(tile, T, V, 2 * ROWS, BN, GROUP)
        row = tile_m * (2 * ROWS)
        col = tile_n * BN
        for step in range(gl.cdiv(K, BK)):
            k = step * BK
            mbarrier.wait(empty.index(stage), phase)
            ready = full.index(stage)
            mbarrier.expect(ready, nbytes)
            async_load(h_desc, [row, k], ready, h_smem.index(2 * stage))
            async_load(h_desc, [row + ROWS, k], ready, h_smem.index(2 * stage + 1))
            if PERMUTED:
                async_load(w_desc, [col // 128, 0, 0, 0, k], ready, w_smem.index(stage))
            else:
                async_load(w_desc, [col, k], ready, w_smem.index(stage))
            stage += 1
            if stage == DEPTH:
                stage = 0
                phase ^= 1


@gluon.jit
def _per_row(x, LAYOUT: gl.constexpr):
    """[ROWS, 1] -> [ROWS]."""
    return gl.convert_layout(gl.reshape(x, (ROWS,)), LAYOUT)


@gluon.jit
def _unpermuted(z, PERMUTED: gl.constexpr):
    """z with its columns in order."""
    if PERMUTED:
        C: gl.constexpr = z.shape[1]
        z = gl.reshape(z, (ROWS, C // 128, 16, 4, 2))
        z = gl.reshape(gl.permute(z, (0, 1, 3, 2, 4)), (ROWS, C))
    return z


@gluon.jit
def _is_leaf(n, col, V):
    """Which of n[ROWS, leaves] are leaves of the vocabulary."""
    leaf = gl.arange(0, n.shape[1], gl.SliceLayout(0, n.type.layout))
    return gl.expand_dims(col // LEAF_COLUMNS + leaf < gl.cdiv(V, LEAF_COLUMNS), 0)


@gluon.jit
def _leaves(z, col, V, ENTROPY: gl.constexpr, PARTIAL: gl.constexpr):
    """(n, s, u)[ROWS, leaves] and e of the columns from `col` on."""
    n, s, u, e = leaf_stats(z, ROWS, z.shape[1] // LEAF_COLUMNS, ENTROPY)
    if PARTIAL:
        some = _is_leaf(n, col, V)
        n = gl.where(some, n, NO_COLUMNS)
        s = gl.where(some, gl.convert_layout(s, n.type.layout), 0.0)
        u = gl.where(some, gl.convert_layout(u, n.type.layout), 0.0)
    return n, s, u, e


@gluon.jit
def _finish_half(
    acc, out, out_smem, bias_ptr, n_ptr, s_ptr, a_ptr, b_ptr, row, col, T, V, cap, inverse_cap,
    scale, inverse, inverse_top,
    MODE: gl.constexpr, HAS_BIAS: gl.constexpr, LOGIT: gl.constexpr, SOFTCAP: gl.constexpr,
    SCALED: gl.constexpr, ENTROPY: gl.constexpr, PARTIAL: gl.constexpr, RAGGED: gl.constexpr,
    LEVELS: gl.constexpr, PERMUTED: gl.constexpr, OF_ROW: gl.constexpr,
):  # fmt: skip
    """Apply MODE to the sums of half a tile, its columns from `col` on; returns (n, s, u)[ROWS]."""
    layout: gl.constexpr = acc.type.layout
    C: gl.constexpr = acc.shape[1]
    bias = 0.0
    if HAS_BIAS:
        cols = col + column_at(gl.arange(0, C, gl.SliceLayout(0, layout)), PERMUTED)
        bias = gl.load(bias_ptr + cols, mask=cols < V, other=0.0).to(gl.float32)
        bias = gl.expand_dims(bias, 0)
    z = final_logits(acc, bias, cap, inverse_cap, scale, inverse, HAS_BIAS, LOGIT, SOFTCAP, SCALED)
    rows = row + gl.arange(0, ROWS, OF_ROW)
    n = gl.zeros([ROWS], gl.float32, OF_ROW)
    s = n
    u = n
    if MODE == GRADIENT:
        d = tile_gradient(z, rows, T, n_ptr, s_ptr, a_ptr, b_ptr, inverse_top, ENTROPY, SOFTCAP)
        store_block(d, out, out_smem, row, col)
    elif MODE == LOGITS:
        cols = col + gl.arange(0, C, gl.SliceLayout(0, layout))
        at = out + gl.expand_dims(rows.to(gl.int64) * V, 1) + gl.expand_dims(cols, 0)
        gl.store(at, z, mask=gl.expand_dims(rows < T, 1) & gl.expand_dims(cols < V, 0))
    else:
        z = _unpermuted(z, PERMUTED)
        if RAGGED:
            cols = col + gl.arange(0, C, gl.SliceLayout(0, z.type.layout))
            z = gl.where(gl.expand_dims(cols < V, 0), z, float("-inf"))
        leaf_n, leaf_s, leaf_u, e = _leaves(z, col, V, ENTROPY, PARTIAL)
        n, s, u = merge_neighbours(
            leaf_n, leaf_s, leaf_u, ROWS, leaf_n.shape[1], LEVELS, ENTROPY
        )  # fmt: skip
        n = _per_row(n, OF_ROW)
        s = _per_row(s, OF_ROW)
        u = _per_row(u, OF_ROW)
        if MODE == EXPONENTIALS:
            target = gl.load(a_ptr + rows, mask=rows < T, other=0.0)
            base = reference_exponent(n, target, out.dtype == gl.float16)
            base = gl.convert_layout(base, gl.SliceLayout(1, leaf_n.type.layout))
            f = pow2(leaf_n - gl.expand_dims(base, 1))
            e = gl.reshape(e * gl.expand_dims(f, 2), (ROWS, C))
            if SOFTCAP:
                e = e * softcap_slope(z, inverse_top)
            store_block(e, out, out_smem, row, col)
    return n, s, u


@gluon.jit
def _store_stats(
    n, s, u, n_ptr, s_ptr, u_ptr, node, row, T, ENTROPY: gl.constexpr, OF_ROW: gl.constexpr
):
    rows = row + gl.arange(0, ROWS, OF_ROW)
    at = node.to(gl.int64) * T + rows
    gl.store(n_ptr + at, n, mask=rows < T)
    gl.store(s_ptr + at, s, mask=rows < T)
    if ENTROPY:
        gl.store(u_ptr + at, u, mask=rows < T)


@gluon.jit
def _finish_right(
    n, s, u, right, out, out_smem, bias_ptr, n_ptr, s_ptr, u_ptr, a_ptr, b_ptr, row, col, T,
    V, cap, inverse_cap, scale, inverse, inverse_top,
    MODE: gl.constexpr, HAS_BIAS: gl.constexpr, LOGIT: gl.constexpr, SOFTCAP: gl.constexpr,
    SCALED: gl.constexpr, ENTROPY: gl.constexpr, PARTIAL: gl.constexpr, RAGGED: gl.constexpr,
    LEVELS: gl.constexpr, PERMUTED: gl.constexpr, OF_ROW: gl.constexpr,
):  # fmt: skip
    """Finish the right half of the tile from (row, col) on, whose left half gave (n, s, u)."""
    C: gl.constexpr = right.shape[1]
    n1, s1, u1 = _finish_half(
        right, out, out_smem, bias_ptr, n_ptr, s_ptr, a_ptr, b_ptr, row, col + C, T, V, cap,
        inverse_cap, scale, inverse, inverse_top, MODE, HAS_BIAS, LOGIT, SOFTCAP, SCALED, ENTROPY,
        PARTIAL, RAGGED, LEVELS, PERMUTED, OF_ROW,
    )  # fmt: skip
    if MODE == EXPONENTIALS:
        _store_stats(n, s, u, n_ptr, s_ptr, u_ptr, col // C, row, T, ENTROPY, OF_ROW)
        if col + C < V:
            _store_stats(n1, s1, u1, n_ptr, s_ptr, u_ptr, col // C + 1, row, T, ENTROPY, OF_ROW)
    if MODE == STATS:
        n, s, u = merge_neighbours(
            gl.join(n, n1), gl.join(s, s1), gl.join(u, u1), ROWS, 2, 1, ENTROPY
        )  # fmt: skip
        n = _per_row(n, OF_ROW)
        s = _per_row(s, OF_ROW)
        u = _per_row(u, OF_ROW)
        _store_stats(n, s, u, n_ptr, s_ptr, u_ptr, col // (2 * C), row, T, ENTROPY, OF_ROW)


@gluon.jit
def _segment(
    left, right, left_high, right_high, h_smem, w_smem, full, empty, stage, phase, steps,
    FIRST: gl.constexpr, LEAD: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    SIDE: gl.constexpr,
):  # fmt: skip
    """Multiply the rest of a segment of `steps` and start the next one. FIRST: no high part yet."""
    left, right, stage, phase = multiply_halves(
        left, right, h_smem, w_smem, full, empty, stage, phase, steps, LEAD, False, True, BN, BK,
        SIDE,
    )  # fmt: skip
    before = stage
    stage, phase = advance(stage, phase, LEAD)
    left, left_high = carry_high(left, left_high, FIRST)
    left, right = start_half(
        left, right, h_smem, w_smem, full, empty, stage, phase, before, LEAD, False, LEAD, False,
        True, BN, BK, SIDE,
    )  # fmt: skip
    right, right_high = carry_high(right, right_high, FIRST)
    right, left = start_half(
        right, left, h_smem, w_smem, full, empty, stage, phase, before, 0, True, LEAD, False, True,
        BN, BK, SIDE,
    )  # fmt: skip
    left, right = warpgroup_mma_wait(2 * LEAD, [left, right])
    return left, right, left_high, right_high, stage, phase


@gluon.jit
def _multiply(
    out, h_smem, w_smem, out_smem, full, empty, bias_ptr, n_ptr, s_ptr, u_ptr, a_ptr, b_ptr,
    T, V, K, segments, segment_steps, cap, inverse_cap, scale, inverse, inverse_top,
    MODE: gl.constexpr, HAS_BIAS: gl.constexpr, LOGIT: gl.constexpr, SOFTCAP: gl.constexpr,
    SCALED: gl.constexpr, ENTROPY: gl.constexpr, PARTIAL: gl.constexpr, RAGGED: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr, LEVELS: gl.constexpr, GROUP: gl.constexpr,
    PERMUTED: gl.constexpr, LEAD: gl.constexpr, SPLIT: gl.constexpr, SIDE: gl.constexpr,
):  # fmt: skip
    """Multiply 64 rows of every tile of this program, with four warps."""
    C: gl.constexpr = BN // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    of_row: gl.constexpr = gl.SliceLayout(1, layout)
    tiles = gl.cdiv(T, 2 * ROWS) * gl.cdiv(V, BN)
    stage = 0
    phase = 0
    right = gl.zeros([ROWS, C], gl.float32, layout)
    nothing = no_high(right)
    right_high = nothing
    n = gl.zeros([ROWS], gl.float32, of_row)
    s = n
    u = n
    row = T  # there is no earlier tile: rows from T on are not stored
    col = 0
    steps = gl.cdiv(K, BK)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        left, right = start_half(
            gl.zeros([ROWS, C], gl.float32, layout), right, h_smem, w_smem, full, empty, stage,
            phase, 0, 0, False, LEAD, False, True, BN, BK, SIDE,
        )  # fmt: skip
        _finish_right(
            n, s, u, whole_sum(right, right_high, SPLIT), out, out_smem, bias_ptr, n_ptr, s_ptr,
            u_ptr, a_ptr, b_ptr, row, col, T, V, cap, inverse_cap, scale, inverse, inverse_top,
            MODE, HAS_BIAS, LOGIT, SOFTCAP, SCALED, ENTROPY, PARTIAL, RAGGED, LEVELS, PERMUTED,
            of_row,
        )  # fmt: skip
        tile_m, tile_n = tile_position(tile, T, V, 2 * ROWS, BN, GROUP)
        row = (2 * tile_m + SIDE) * ROWS
        col = tile_n * BN
        right, left = start_half(
            gl.zeros([ROWS, C], gl.float32, layout), left, h_smem, w_smem, full, empty, stage,
            phase, 0, 0, True, LEAD, False, True, BN, BK, SIDE,
        )  # fmt: skip
        left_high = nothing
        if SPLIT:
            left, right, left_high, right_high, stage, phase = _segment(
                left, right, left_high, right_high, h_smem, w_smem, full, empty, stage, phase,
                segment_steps, True, LEAD, BN, BK, SIDE,
            )  # fmt: skip
            for _ in range(2, segments):
                left, right, left_high, right_high, stage, phase = _segment(
                    left, right, left_high, right_high, h_smem, w_smem, full, empty, stage, phase,
                    segment_steps, False, LEAD, BN, BK, SIDE,
                )  # fmt: skip
        left, right, stage, phase = multiply_halves(
            left, right, h_smem, w_smem, full, empty, stage, phase,
            steps - (segments - 1) * segment_steps, LEAD, False, True, BN, BK, SIDE,
        )  # fmt: skip
        n, s, u = _finish_half(
            whole_sum(left, left_high, SPLIT), out, out_smem, bias_ptr, n_ptr, s_ptr, a_ptr,
            b_ptr, row, col, T, V, cap, inverse_cap, scale, inverse, inverse_top, MODE, HAS_BIAS,
            LOGIT, SOFTCAP, SCALED, ENTROPY, PARTIAL, RAGGED, LEVELS, PERMUTED, of_row,
        )  # fmt: skip
        # with n, s and u, before whose computation the compiler would otherwise wait
        right, n, s, u = warpgroup_mma_wait(0, [right, n, s, u])
        release(empty, stage, LEAD)
        stage, phase = advance(stage, phase, LEAD)
    _finish_right(
        n, s, u, whole_sum(right, right_high, SPLIT), out, out_smem, bias_ptr, n_ptr, s_ptr,
        u_ptr, a_ptr, b_ptr, row, col, T, V, cap, inverse_cap, scale, inverse, inverse_top, MODE,
        HAS_BIAS, LOGIT, SOFTCAP, SCALED, ENTROPY, PARTIAL, RAGGED, LEVELS, PERMUTED, of_row,
    )  # fmt: skip
    if (MODE == EXPONENTIALS) | (MODE == GRADIENT):
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["T"])
def _tiles_hopper_kernel(
    h_desc, w_desc, out, bias_ptr, n_ptr, s_ptr, u_ptr, a_ptr, b_ptr, T, V, K,
    segments, segment_steps, cap, inverse_cap, scale, inverse, inverse_top,
    MODE: gl.constexpr, HAS_BIAS: gl.constexpr, LOGIT: gl.constexpr, SOFTCAP: gl.constexpr,
    SCALED: gl.constexpr, ENTROPY: gl.constexpr, PARTIAL: gl.constexpr, RAGGED: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr, LEVELS: gl.constexpr, GROUP: gl.constexpr,
    PERMUTED: gl.constexpr, LEAD: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = h_desc.dtype
    h_smem = gl.allocate_shared_memory(dtype, [2 * DEPTH, ROWS, BK], h_desc.layout)
    w_box: gl.constexpr = [DEPTH] + w_desc.block_type.shape  # noqa: RUF005 (Gluon has no stars)
    w_smem = gl.allocate_shared_memory(dtype, w_box, w_desc.layout)
    if (MODE == STATS) | (MODE == LOGITS):
        out_smem = h_smem  # unused
    else:
        out_smem = gl.allocate_shared_memory(dtype, [2, ROWS, BN // 2], out.layout)
    full, empty = barriers(DEPTH, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                out, h_smem, w_smem, out_smem.index(0), full, empty, bias_ptr, n_ptr, s_ptr,
                u_ptr, a_ptr, b_ptr, T, V, K, segments, segment_steps, cap, inverse_cap, scale,
                inverse, inverse_top,
                MODE, HAS_BIAS, LOGIT, SOFTCAP, SCALED, ENTROPY, PARTIAL, RAGGED, BN, BK, LEVELS,
                GROUP, PERMUTED, LEAD, SPLIT, 0,
            )),
            (_multiply, (
                out, h_smem, w_smem, out_smem.index(1), full, empty, bias_ptr, n_ptr, s_ptr,
                u_ptr, a_ptr, b_ptr, T, V, K, segments, segment_steps, cap, inverse_cap, scale,
                inverse, inverse_top,
                MODE, HAS_BIAS, LOGIT, SOFTCAP, SCALED, ENTROPY, PARTIAL, RAGGED, BN, BK, LEVELS,
                GROUP, PERMUTED, LEAD, SPLIT, 1,
            )),
            (_copy_operands, (
                h_desc, w_desc, h_smem, w_smem, full, empty, T, V, K, BN, BK, GROUP, PERMUTED,
            )),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


def _permuted(w: Tensor, box: list[int]) -> TensorDescriptor:
    """A tensor map of w[V, H] with its rows in the order of PERMUTED (`matmul/epilogue.py`)."""
    (v, k), row = w.shape, w.stride(0)
    box = [box[0] // 128, 16, 4, 2, box[1]]
    shape, strides = [v // 128, 16, 4, 2, k], [128 * row, 2 * row, 32 * row, row, 1]
    return tensor_map(
        TensorDescriptor, w.data_ptr(), w.dtype, tuple(shape), tuple(strides), tuple(box),
        shared_layout(tuple(box), w.dtype),
    )  # fmt: skip


def hopper_tiles(
    plan: EpiloguePlan, h: Tensor, w: Tensor, bias: Tensor | None, n: Tensor | None,
    s: Tensor | None, u: Tensor | None, a: Tensor | None, b: Tensor | None, out: Tensor | None,
    numbers: tuple, flags: tuple, cache: ShapeCache | None = None,
) -> None:  # fmt: skip
    """`linear_logp.launch.run_tiles`; "logits" are stored to out[T, V], contiguous fp32."""
    cache = ShapeCache() if cache is None else cache
    programs, counts, constants = cache.get_or_create(
        "tiles", h.shape[0], _constants, plan, h, w, flags
    )
    maps = cache.get_or_create("maps", (h.data_ptr(), w.data_ptr(), h.shape[0]), _maps, plan, h, w)
    stored = out
    if plan.epilogue in ("exponentials", "gradient"):
        stored = tensor_map_of(out, [ROWS.value, plan.tile.n // 2])
    launch(
        cache, _tiles_hopper_kernel, (programs, 1, 1),
        (*maps, stored, bias, n, s, u, a, b, *counts, *numbers, *constants),
        {"num_warps": 4, "maxnreg": 168},
    )  # fmt: skip


def _maps(plan: EpiloguePlan, h: Tensor, w: Tensor) -> list[TensorDescriptor]:
    tile = plan.tile
    of_w = (_permuted if plan.permuted else tensor_map_of)(w, [tile.n, tile.k])
    return [tensor_map_of(h, [ROWS.value, tile.k]), of_w]


def _constants(plan: EpiloguePlan, h: Tensor, w: Tensor, flags: tuple) -> tuple[int, tuple, tuple]:
    """What launches of one shape share: (programs, numbers, constants)."""
    t, v, k = h.shape[0], w.shape[0], h.shape[1]
    tile, segment = plan.tile, plan.segment
    assert not segment or 4 * tile.k <= SEGMENT_UNIT  # `multiply_halves` of a segment
    leaves = plan.epilogue in ("statistics", "exponentials")
    counts = (
        t, v, k, plan.last_segment // (segment or k) + 1, (segment or k) // tile.k
    )  # fmt: skip
    constants = (
        MODES[plan.epilogue], *flags, leaves and v % tile.n != 0, leaves and v % LEAF != 0,
        tile.n, tile.k, levels(tile.n // 2 // LEAF), tile.group, plan.permuted,
        lead_steps(k, tile.k), segment > 0,
    )  # fmt: skip
    return min(cdiv(t, tile.m) * cdiv(v, tile.n), plan.processors), counts, constants


def split_product(plan: MatmulPlan, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out[M, N] = a[M, K] @ b[N, K]^T (+ bias[N]) in the segments of `split.py`."""
    epilogue_plan = EpiloguePlan(
        kernel="hopper", epilogue="logits", tile=plan.tile, segment=plan.segment,
        last_segment=plan.last_segment, permuted=False, tma_store=False, processors=plan.programs,
    )  # fmt: skip
    flags = (bias is not None, gl.float32, False, False, False)
    numbers = (0.0, 0.0, 1.0, 1.0, 0.0)
    hopper_tiles(epilogue_plan, a, b, bias, None, None, None, None, None, out, numbers, flags)
