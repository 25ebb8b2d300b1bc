# ruff: noqa: SIM108 (a ternary of two shapes is no Triton)
"""The Triton kernels of the matrix product under `linear`, its gradients, and fused operators.

    C[m, n] = round( sum_{k = 0, 1, ...} A[m, k] * B[k, n]  (+ bias[n]) )

Order: one fp32 accumulator per element, with K from front to back, in the tensor core's own steps
of 16 (fp16, bf16) or one by one (fp32, IEEE products, no tf32). Where the result of 16-bit products
is fp32 and K is long, the sum is split into the segments of `split.py`. Programs never share K, so
an element's sum depends on neither M, nor the tile, nor the other rows. bf16 and fp16 tiles of
every shape in `tiles.py` give the same fp32 bits. `self_check.py` checks that on each machine
before these tiles are used; if the check fails, one tile is used for all products.

Portable backend: error-free splitting (`numerics/error_free.py`), whose sums no order can change.

Tiles: chosen from M, N and K (`tiles.py`). Hopper and newer GPUs read operands with TMA (host-side
descriptors). Other GPUs, and tensors that TMA cannot address (rows not a multiple of 16 bytes), use
the pointer kernel, which has the same order and the same bits. Ampere and Ada run the pointer
kernel by design; they have not been tested.

A[M, K]: `a`, or `a` transposed (trans_a)   B[K, N]: `b`, or `b` transposed (trans_b)
"""

import triton
import triton.language as tl

from rlk_kernels.matmul.steps import begins_segment, carry_high, tile_position


@triton.jit
def _store_tile(
    acc, c_ptr, c_desc, bias_ptr, row, col, M, N, stride_cm,
    BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, TMA_STORE: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """Store a tile of C. ADD: add it to the present value, in fp32."""
    cols = col + tl.arange(0, BN)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    if TMA_STORE:
        c_desc.store([row, col], acc.to(c_desc.dtype))
    else:
        rows = row + tl.arange(0, BM)
        where = c_ptr + rows.to(tl.int64)[:, None] * stride_cm + cols[None, :]
        mask = (rows[:, None] < M) & (cols[None, :] < N)
        if ADD:
            acc = tl.load(where, mask=mask, other=0.0) + acc
        tl.store(where, acc.to(c_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _gemm_tma_kernel(
    a_desc, b_desc, b2_desc, c_desc, c2_desc, c_ptr, bias_ptr, M, N, K, last, N1, stride_cm,
    TRANS_A: tl.constexpr, TRANS_B: tl.constexpr, HAS_BIAS: tl.constexpr, TMA_STORE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    SUBTILE: tl.constexpr, FLATTEN: tl.constexpr, SWAP: tl.constexpr, OVERLAP: tl.constexpr,
    TAIL: tl.constexpr, SEGMENT: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    if OVERLAP > 0:
        tl.extra.cuda.gdc_wait()
    if OVERLAP == 1:
        tl.extra.cuda.gdc_launch_dependents()
    tiles = tl.cdiv(M, BM) * tl.cdiv(N1, BN)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n = tile_position(tile, M, N1, BM, BN, GROUP)
        row = tile_m * BM
        col = tile_n * BN
        if SWAP:
            acc = tl.zeros((BN, BM), tl.float32)
        else:
            acc = tl.zeros((BM, BN), tl.float32)
        if SEGMENT > 0:
            high = tl.zeros_like(acc)
        for step in range(tl.cdiv(K, BK)):
            k = step * BK
            if SEGMENT > 0 and begins_segment(k, SEGMENT, last):
                acc, high = carry_high(acc, high)
            if TRANS_A:
                a = a_desc.load([k, row]).T
            else:
                a = a_desc.load([row, k])
            if TRANS_B:
                b = b_desc.load([col, k]).T
            else:
                b = b_desc.load([k, col])
            if SWAP:
                acc = tl.dot(b.T, a.T, acc)
            else:
                acc = tl.dot(a, b, acc)
        if SEGMENT > 0:
            acc += high
        if SWAP:
            acc = acc.T
        if SUBTILE:
            halves = tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1))
            left, right = tl.split(halves)
            _store_tile(
                left, c_ptr, c_desc, bias_ptr, row, col, M, N, stride_cm,
                BM, BN // 2, HAS_BIAS, TMA_STORE, ADD,
            )  # fmt: skip
            _store_tile(
                right, c_ptr, c_desc, bias_ptr, row, col + BN // 2, M, N, stride_cm,
                BM, BN // 2, HAS_BIAS, TMA_STORE, ADD,
            )  # fmt: skip
        else:
            _store_tile(
                acc, c_ptr, c_desc, bias_ptr, row, col, M, N, stride_cm,
                BM, BN, HAS_BIAS, TMA_STORE, ADD,
            )  # fmt: skip
    if TAIL > 0:  # the columns from N1 on have narrower tiles, so that processors end together
        mine = tl.maximum(tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0)), 0)
        start = tl.program_id(0) + mine * tl.num_programs(0) - tiles
        rest = tl.cdiv(M, BM) * tl.cdiv(N - N1, TAIL)
        for tile in tl.range(start, rest, tl.num_programs(0)):
            tile_m, tile_n = tile_position(tile, M, N - N1, BM, TAIL, GROUP)
            row = tile_m * BM
            col = N1 + tile_n * TAIL
            acc = tl.zeros((BM, TAIL), tl.float32)
            for step in range(tl.cdiv(K, BK)):
                k = step * BK
                if TRANS_A:
                    a = a_desc.load([k, row]).T
                else:
                    a = a_desc.load([row, k])
                if TRANS_B:
                    b = b2_desc.load([col, k]).T
                else:
                    b = b2_desc.load([k, col])
                acc = tl.dot(a, b, acc)
            _store_tile(
                acc, c_ptr, c2_desc, bias_ptr, row, col, M, N, stride_cm,
                BM, TAIL, HAS_BIAS, TMA_STORE, ADD,
            )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _gemm_pointer_kernel(
    a_ptr, b_ptr, c_ptr, bias_ptr, M, N, K, last,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm,
    HAS_BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr, SEGMENT: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_position(tl.program_id(0), M, N, BM, BN, GROUP)
    rows = tile_m * BM + tl.arange(0, BM)
    cols = tile_n * BN + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    a_at = a_ptr + rows.to(tl.int64)[:, None] * stride_am + ks.to(tl.int64)[None, :] * stride_ak
    b_at = b_ptr + ks.to(tl.int64)[:, None] * stride_bk + cols.to(tl.int64)[None, :] * stride_bn
    acc = tl.zeros((BM, BN), tl.float32)
    if SEGMENT > 0:
        high = tl.zeros_like(acc)
    for step in range(tl.cdiv(K, BK)):
        remaining = K - step * BK
        if SEGMENT > 0 and begins_segment(step * BK, SEGMENT, last):
            acc, high = carry_high(acc, high)
        a = tl.load(a_at, mask=(rows[:, None] < M) & (ks[None, :] < remaining), other=0.0)
        b = tl.load(b_at, mask=(ks[:, None] < remaining) & (cols[None, :] < N), other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_at += tl.cast(BK, tl.int64) * stride_ak
        b_at += tl.cast(BK, tl.int64) * stride_bk
    if SEGMENT > 0:
        acc += high
    _store_tile(
        acc, c_ptr, c_ptr, bias_ptr, tile_m * BM, tile_n * BN, M, N, stride_cm,
        BM, BN, HAS_BIAS, False, ADD,
    )  # fmt: skip
