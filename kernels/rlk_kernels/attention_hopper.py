"""Prefill of `attention` on Hopper: the order of `attention_triton.py`, its bits, another schedule.

One program holds a processor: a warp copies keys and values (TMA), and two groups of four warps
share them, each with 64 packed rows of its own. While the tensor cores multiply the weights of
one block by its values, a group works on the scores of the next. Nothing of that touches the
order of a row's sum: blocks front to back in chunks of CHUNK, every operation as in
`attention_triton.attend_block` and `merge`. Written in Gluon, which ships with Triton.

T = queries  S = keys  D = head size  G = query heads of a KV head
"""

import torch
import triton
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rlk_kernels.attention_triton import CHUNK, LOG2E
from rlk_kernels.gemm import _processors

ROWS = gl.constexpr(64)
"""Packed rows of a group of four warps; a program has two groups."""
KEYS = gl.constexpr(64)
"""Keys of a block, as `attention_triton.block_n` has it for these head sizes and dtypes."""
PAIR = gl.constexpr(128)
"""Keys of two blocks: what is copied at once, and what one product of queries and keys takes."""
STAGES = {64: 4, 128: 2}
"""head size -> pairs of blocks on their way or in use."""


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _row_sum(p, LEVELS: gl.constexpr):
    """Sum over 2**LEVELS columns by halves (see `attention_triton.row_sum`)."""
    rows: gl.constexpr = p.shape[0]
    for level in gl.static_range(LEVELS):
        p = gl.reduce(gl.reshape(p, [rows, 2, 1 << (LEVELS - 1 - level)]), 1, _add)
    return gl.reshape(p, [rows])


@gluon.jit
def _merge(m, den, acc, m_new, den_new, acc_new, wide: gl.constexpr):
    """`attention_triton.merge`; `wide`: the layout of acc's rows."""
    top = gl.maximum(m, m_new)
    safe = gl.where(top == float("-inf"), 0.0, top)
    old = gl.exp2(m - safe)
    new = gl.exp2(m_new - safe)
    den = gl.fma(den, old, den_new * new)
    old_rows = gl.expand_dims(gl.convert_layout(old, wide), 1)
    new_rows = gl.expand_dims(gl.convert_layout(new, wide), 1)
    acc = gl.fma(acc, gl.zeros_like(acc) + old_rows, acc_new * new_rows)
    return top, den, acc


@gluon.jit
def _tile(
    tile, cu_q_ptr, cu_k_ptr, B, window, blocks,
    HK: gl.constexpr, G: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """What tile `tile` is: KV head, sequence, first row, and the keys that its rows see."""
    BM: gl.constexpr = 2 * ROWS
    block = blocks - 1 - tile // HK
    hk = tile % HK
    low = 0
    high = B
    while high - low > 1:
        middle = (low + high) // 2
        if gl.load(cu_q_ptr + middle) * G // BM + middle <= block:
            low = middle
        else:
            high = middle
    q_start = gl.load(cu_q_ptr + low)
    len_q = gl.load(cu_q_ptr + low + 1) - q_start
    k_start = gl.load(cu_k_ptr + low)
    len_k = gl.load(cu_k_ptr + low + 1) - k_start
    # Even sequences from their long last rows down, odd ones up: costs along the tiles have no
    # jump, so programs that take every so many-th tile, back and forth, end together.
    start = q_start * G // BM + low
    step = block - start
    if low % 2 == 1:
        step = (q_start + len_q) * G // BM + low - start - step
    first_row = step * BM
    begin = 0
    seen_end = len_k
    if CAUSAL:
        offset = len_k - len_q
        end_row = gl.minimum(first_row + BM, len_q * G) - 1
        seen_end = gl.maximum(end_row // G + offset + 1, 0)
    if WINDOWED:
        shared_end = len_k
        if CAUSAL:
            shared_end = gl.maximum(first_row // G + len_k - len_q + 1, 0)
        begin = gl.maximum(shared_end - window, 0) // PAIR * PAIR
    count = gl.maximum(gl.cdiv(seen_end - begin, PAIR), 0)
    if first_row >= len_q * G:
        count = 0
    return hk, q_start, len_q, k_start, len_k, first_row, begin, count


@gluon.jit
def _copy_keys(
    k_desc, v_desc, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
    cu_q_ptr, cu_k_ptr, B, window, blocks, step_k, step_v,
    HK: gl.constexpr, G: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr,
    DEPTH: gl.constexpr,
):  # fmt: skip
    """One warp: every tile's blocks of keys and values, in the order in which they are used."""
    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    at = 0
    for turn in range(gl.cdiv(blocks * HK, programs)):
        tile = turn * programs + (pid if turn % 2 == 0 else programs - 1 - pid)
        if tile < blocks * HK:
            hk, _q_start, _len_q, k_start, _len_k, _row, begin, count = _tile(
                tile, cu_q_ptr, cu_k_ptr, B, window, blocks, HK, G, CAUSAL, WINDOWED
            )
            for i in range(count):
                stage = at % DEPTH
                free = (at // DEPTH & 1) ^ 1
                key = k_start + begin + i * PAIR
                mbarrier.wait(k_empty.index(stage), free)
                mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    k_desc, [key, hk * step_k], k_full.index(stage), k_smem.index(stage)
                )
                mbarrier.wait(v_empty.index(stage), free)
                mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    v_desc, [key, hk * step_v], v_full.index(stage), v_smem.index(stage)
                )
                at += 1


@gluon.jit
def _mask(s, first, len_k, shared_end, last, window, WINDOWED: gl.constexpr):
    """-inf at the keys that a row does not see, in the pairs that hold such keys."""
    if first + PAIR > shared_end:
        key = first + gl.arange(0, PAIR, gl.SliceLayout(0, s.type.layout))
        key = gl.expand_dims(key, 0)
        visible = (key <= gl.expand_dims(last, 1)) & (key < len_k)
        if WINDOWED:
            visible = visible & (key > gl.expand_dims(last, 1) - window)
        s = gl.where(visible, s, float("-inf"))
    return s


@gluon.jit
def _block(s, m, den, scale):
    """(weights, m, den, factor of what was there) after the scores of a block."""
    top = gl.maximum(m, gl.max(s, 1) * scale)
    safe = gl.where(top == float("-inf"), 0.0, top)
    p = gl.exp2(gl.fma(s, gl.full(s.shape, 1.0, gl.float32, s.type.layout) * scale,
                       gl.zeros_like(s) - gl.expand_dims(safe, 1)))  # fmt: skip
    old = gl.exp2(m - safe)
    total = gl.convert_layout(_row_sum(p, 6), m.type.layout)
    den = gl.fma(den, old, total)
    return p, top, den, old


@gluon.jit
def _pair(s, m, den, scale, score: gl.constexpr, weight: gl.constexpr, dtype: gl.constexpr):
    """`_block` for each of the two blocks of a pair, the weights as operands of a product."""
    rows: gl.constexpr = s.shape[0]
    s_a, s_b = gl.split(gl.permute(gl.reshape(s, [rows, 2, KEYS]), (0, 2, 1)))
    p_a, m, den, old_a = _block(gl.convert_layout(s_a, score), m, den, scale)
    p_b, m, den, old_b = _block(gl.convert_layout(s_b, score), m, den, scale)
    p_a = gl.convert_layout(p_a.to(dtype), weight)
    p_b = gl.convert_layout(p_b.to(dtype), weight)
    return p_a, p_b, m, den, old_a, old_b


@gluon.jit
def _clear_behind(v, first, len_k):
    """Zeros behind the sequence: its weights are 0, but what lies there may not be finite."""
    if first + PAIR > len_k:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // v.shape[1], v.shape[1] // 8],
                                                [4, 1], [1, 0])  # fmt: skip
        for half in gl.static_range(2):
            part = v.slice(half * KEYS, KEYS)
            key = first + half * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, layout))
            x = part.load(layout)
            part.store(gl.where(gl.expand_dims(key, 1) < len_k, x, gl.zeros_like(x)))
        fence_async_shared()


@gluon.jit
def _attend(
    q_ptr, out_ptr, lse_ptr, q_smem, all_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
    turns, cu_q_ptr, cu_k_ptr, B, T, scale, window, blocks, stride_qt, stride_qh,
    HK: gl.constexpr, G: gl.constexpr, D: gl.constexpr, CHUNK: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, DEPTH: gl.constexpr, GROUP: gl.constexpr,
    TURNS: gl.constexpr,
):  # fmt: skip
    """Four warps: 64 packed rows of every tile."""
    double: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PAIR, 16])
    score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    weight: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    row_of: gl.constexpr = gl.SliceLayout(1, score)
    wide_row: gl.constexpr = gl.SliceLayout(1, wide)
    double_row: gl.constexpr = gl.SliceLayout(1, double)
    plain: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    plain_row: gl.constexpr = gl.SliceLayout(1, plain)
    dtype: gl.constexpr = q_ptr.dtype.element_ty

    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    at = 0
    passed = 0
    for turn in range(gl.cdiv(blocks * HK, programs)):
        tile = turn * programs + (pid if turn % 2 == 0 else programs - 1 - pid)
        if tile < blocks * HK:
            hk, q_start, len_q, _k_start, len_k, tile_row, begin, count = _tile(
                tile, cu_q_ptr, cu_k_ptr, B, window, blocks, HK, G, CAUSAL, WINDOWED
            )
            first_row = tile_row + GROUP * ROWS
            row = first_row + gl.arange(0, ROWS, plain_row)
            cols = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, plain)), 0)
            live = gl.expand_dims(row < len_q * G, 1)
            token = (q_start + row // G).to(gl.int64)
            head = hk * G + row % G
            where = gl.expand_dims(token * stride_qt + head * stride_qh, 1) + cols
            q_smem.store(gl.load(q_ptr + where, mask=live, other=0.0))
            fence_async_shared()

            row_d = first_row + gl.arange(0, ROWS, double_row)
            last = len_k - 1 + row_d * 0
            shared_end = len_k  # every row here sees all keys before it
            if CAUSAL:
                last = row_d // G + len_k - len_q
                shared_end = gl.minimum(gl.maximum(first_row // G + len_k - len_q + 1, 0), len_k)
            if WINDOWED:
                shared_end = 0

            m = gl.full([ROWS], float("-inf"), gl.float32, row_of)
            den = gl.zeros([ROWS], gl.float32, row_of)
            acc = gl.zeros([ROWS, D], gl.float32, wide)
            m_all = m
            den_all = den
            all_smem.store(acc)  # the sums of the chunks before: registers are scarce
            nothing = gl.zeros([ROWS, PAIR], gl.float32, double)
            if count > 0:
                stage = at % DEPTH
                mbarrier.wait(k_full.index(stage), at // DEPTH & 1)
                s = warpgroup_mma(
                    q_smem, k_smem.index(stage).permute((1, 0)), nothing, use_acc=False,
                    is_async=True,
                )  # fmt: skip
                s = warpgroup_mma_wait(0, [s])
                mbarrier.arrive(k_empty.index(stage), count=1)
                s = _mask(s, begin, len_k, shared_end, last, window, WINDOWED)
                p_a, p_b, m, den, _, old_b = _pair(s, m, den, scale, score, weight, dtype)
                mbarrier.wait(k_full.index((at + 1) % DEPTH), (at + 1) // DEPTH & 1, count > 1)
                for i in range(1, count):
                    first = begin + i * PAIR
                    before = at % DEPTH
                    before_phase = at // DEPTH & 1
                    at += 1
                    stage = at % DEPTH
                    v = v_smem.index(before)
                    mbarrier.wait(v_full.index(before), before_phase)
                    if TURNS > 0:
                        mbarrier.wait(turns.index(GROUP), (passed & 1) ^ (1 - GROUP))
                        passed += 1
                    sums = warpgroup_mma(p_a, v.slice(0, KEYS), acc, is_async=True)
                    s = warpgroup_mma(
                        q_smem, k_smem.index(stage).permute((1, 0)), nothing, use_acc=False,
                        is_async=True,
                    )  # fmt: skip
                    acc, p_a = warpgroup_mma_wait(1, [sums, p_a])
                    acc = acc * gl.expand_dims(gl.convert_layout(old_b, wide_row), 1)
                    sums = warpgroup_mma(p_b, v.slice(KEYS, KEYS), acc, is_async=True)
                    if TURNS == 1:
                        mbarrier.arrive(turns.index(1 - GROUP), count=1)
                    s = warpgroup_mma_wait(1, [s])
                    if TURNS == 2:
                        mbarrier.arrive(turns.index(1 - GROUP), count=1)
                    mbarrier.arrive(k_empty.index(stage), count=1)
                    s = _mask(s, first, len_k, shared_end, last, window, WINDOWED)
                    fresh = first % CHUNK == 0
                    m_chunk = m
                    den_chunk = den
                    m = gl.where(fresh, float("-inf"), m)
                    den = gl.where(fresh, 0.0, den)
                    next_a, next_b, m, den, old_a, old_b = _pair(
                        s, m, den, scale, score, weight, dtype
                    )
                    # The wait for the next keys stands here, and everything is in the wait for the
                    # tensor cores: else the compiler puts the latter before the exponentials.
                    following = at + 1
                    mbarrier.wait(
                        k_full.index(following % DEPTH), following // DEPTH & 1, i + 1 < count
                    )
                    acc, p_b, p_a, next_b, m, den, old_a, old_b = warpgroup_mma_wait(
                        0, [sums, p_b, next_a, next_b, m, den, old_a, old_b]
                    )
                    p_b = next_b
                    mbarrier.arrive(v_empty.index(before), count=1)
                    if fresh:
                        m_all, den_all, acc = _merge(
                            m_all, den_all, all_smem.load(wide), m_chunk, den_chunk, acc, wide_row
                        )
                        all_smem.store(acc)
                        acc = gl.zeros([ROWS, D], gl.float32, wide)
                    acc = acc * gl.expand_dims(gl.convert_layout(old_a, wide_row), 1)
                stage = at % DEPTH
                v = v_smem.index(stage)
                mbarrier.wait(v_full.index(stage), at // DEPTH & 1)
                _clear_behind(v, begin + (count - 1) * PAIR, len_k)
                sums = warpgroup_mma(p_a, v.slice(0, KEYS), acc, is_async=True)
                acc = warpgroup_mma_wait(0, [sums])
                acc = acc * gl.expand_dims(gl.convert_layout(old_b, wide_row), 1)
                sums = warpgroup_mma(p_b, v.slice(KEYS, KEYS), acc, is_async=True)
                acc = warpgroup_mma_wait(0, [sums])
                mbarrier.arrive(v_empty.index(stage), count=1)
                at += 1
            m_all, den_all, acc = _merge(m_all, den_all, all_smem.load(wide), m, den, acc, wide_row)

            empty = den_all == 0.0
            inverse = 1.0 / gl.where(empty, 1.0, den_all)
            out = acc * gl.expand_dims(gl.convert_layout(inverse, wide_row), 1) + 0.0
            lse = (m_all + gl.log2(gl.where(empty, 1.0, den_all))) * 0.6931471805599453
            lse = gl.where(empty, float("-inf"), lse)
            row_s = first_row + gl.arange(0, ROWS, row_of)
            token_s = (q_start + row_s // G).to(gl.int64)
            head_s = (hk * G + row_s % G).to(gl.int64)
            gl.store(lse_ptr + head_s * T + token_s, lse, mask=row_s < len_q * G)
            q_smem.store(out.to(dtype))
            place = gl.expand_dims((token * (HK * G) + head) * D, 1) + cols
            gl.store(out_ptr + place, q_smem.load(plain), mask=live)


@gluon.jit(do_not_specialize=["B", "T", "window", "blocks"])
def _attention_hopper_kernel(
    q_ptr, k_desc, v_desc, out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, B, T, scale, window, blocks,
    stride_qt, stride_qh, step_k, step_v,
    HK: gl.constexpr, G: gl.constexpr, D: gl.constexpr, CHUNK: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, DEPTH: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    q_smem = gl.allocate_shared_memory(
        dtype, [2, ROWS, D], gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    )
    all_smem = gl.allocate_shared_memory(
        gl.float32, [2, ROWS, D], gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    )
    k_smem = gl.allocate_shared_memory(dtype, [DEPTH, PAIR, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [DEPTH, PAIR, D], v_desc.layout)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], bars)
    k_empty = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], bars)
    v_full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], bars)
    v_empty = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], bars)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    for stage in gl.static_range(DEPTH):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_attend, (
                q_ptr, out_ptr, lse_ptr, q_smem.index(0), all_smem.index(0), k_smem, v_smem,
                k_full, k_empty, v_full, v_empty, turns,
                cu_q_ptr, cu_k_ptr, B, T, scale, window, blocks,
                stride_qt, stride_qh, HK, G, D, CHUNK, CAUSAL, WINDOWED, DEPTH, 0, TURNS,
            )),
            (_attend, (
                q_ptr, out_ptr, lse_ptr, q_smem.index(1), all_smem.index(1), k_smem, v_smem,
                k_full, k_empty, v_full, v_empty, turns,
                cu_q_ptr, cu_k_ptr, B, T, scale, window, blocks,
                stride_qt, stride_qh, HK, G, D, CHUNK, CAUSAL, WINDOWED, DEPTH, 1, TURNS,
            )),
            (_copy_keys, (
                k_desc, v_desc, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
                cu_q_ptr, cu_k_ptr, B, window, blocks, step_k, step_v,
                HK, G, CAUSAL, WINDOWED, DEPTH,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel can address these tensors (on a device that has it)."""
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[2] in STAGES
        and k.shape[0] > 0
        and all(x.data_ptr() % 16 == 0 and x.stride(2) == 1 for x in (q, k, v))
        and all(x.stride(i) * 2 % 16 == 0 for x in (q, k, v) for i in (0, 1))
        and all((x.shape[1] - 1) * x.stride(1) + x.shape[2] <= x.stride(0) for x in (k, v))
    )


def prefill(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, causal: bool, scale: float,
    window: int | None, out: Tensor, lse: Tensor, turns: int = 1,
) -> None:  # fmt: skip
    """Fill out[T, Hq, D] and lse[Hq, T]."""
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    batch = cu_q.numel() - 1
    blocks = tokens * group // (2 * ROWS.value) + batch
    dtype = gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([PAIR.value, dim], dtype)

    def rows_of(x: Tensor) -> TensorDescriptor:
        columns = (kv_heads - 1) * x.stride(1) + dim
        return TensorDescriptor(
            x, [x.shape[0], columns], [x.stride(0), 1], [PAIR.value, dim], layout
        )

    programs = min(blocks * kv_heads, _processors(q.device))
    _attention_hopper_kernel[(programs,)](
        q, rows_of(k), rows_of(v), out, lse, cu_q, cu_k, batch, tokens, scale * LOG2E,
        window or 0, blocks, q.stride(0), q.stride(1), k.stride(1), v.stride(1),
        kv_heads, group, dim, CHUNK, causal, window is not None, STAGES[dim], turns,
        num_warps=4, maxnreg=168,
    )  # fmt: skip


__all__ = ["prefill", "takes", "triton"]
