# ruff: noqa: SIM108 (a ternary of two shapes is no Triton)
"""The Triton kernels of `accumulate`.

Between calls the accumulator of a 16-bit output is stored in two halves: `hi`, the upper 16 bits of
each fp32 number, in the output itself, and `lo`, the lower 16 bits.
"""

import triton
import triton.language as tl

from rlk_kernels.matmul.steps import tile_position


@triton.jit
def _accumulator(hi, lo):
    bits = (hi.to(tl.int32) << 16) | (lo.to(tl.int32) & 0xFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _addresses(base, row, col, N, BM: tl.constexpr, BN: tl.constexpr):
    rows = (row + tl.arange(0, BM)).to(tl.int64)
    cols = col + tl.arange(0, BN)
    return base + rows[:, None] * N + cols[None, :]


@triton.jit
def _row_scale(scale_ptr, row, M, BM: tl.constexpr):
    rows = row + tl.arange(0, BM)
    return tl.load(scale_ptr + rows, mask=rows < M, other=0.0)[:, None]


@triton.jit(do_not_specialize=["M", "K"])
def _sum_tma_kernel(
    a_desc, b_desc, c_desc, lo_desc, scale_ptr, M, N, K,
    TRANS_A: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, OUT: tl.constexpr,
    SCALED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # a program starts its next tile while the previous one is still being written
    tiles = tl.cdiv(M, BM) * tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        tile_m, tile_n = tile_position(tile, M, N, BM, BN, GROUP)
        row = tile_m * BM
        col = tile_n * BN
        if FIRST:
            acc = tl.zeros((BM, BN), tl.float32)
        else:
            acc = _accumulator(c_desc.load([row, col]), lo_desc.load([row, col]))
        for step in range(tl.cdiv(K, BK)):
            k = step * BK
            if TRANS_A:
                a = a_desc.load([k, row]).T
            else:
                a = a_desc.load([row, k])
            acc = tl.dot(a, b_desc.load([k, col]), acc)
        if SCALED:
            acc *= _row_scale(scale_ptr, row, M, BM)
        if LAST:
            c_desc.store([row, col], acc.to(OUT).to(tl.int16, bitcast=True))
        else:
            bits = acc.to(tl.int32, bitcast=True)
            c_desc.store([row, col], (bits >> 16).to(tl.int16))
            lo_desc.store([row, col], bits.to(tl.int16))


@triton.jit(do_not_specialize=["M", "K"])
def _sum_pointer_kernel(
    a_ptr, b_ptr, c_ptr, lo_ptr, scale_ptr, M, N, K, stride_am, stride_ak, stride_b,
    FIRST: tl.constexpr, LAST: tl.constexpr, WIDE: tl.constexpr, OUT: tl.constexpr,
    SCALED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_position(tl.program_id(0), M, N, BM, BN, GROUP)
    row = tile_m * BM
    col = tile_n * BN
    rows = row + tl.arange(0, BM)
    cols = col + tl.arange(0, BN)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    at = _addresses(c_ptr, row, col, N, BM, BN)
    lo_at = _addresses(lo_ptr, row, col, N, BM, BN)
    if not FIRST:
        if WIDE:
            acc = tl.load(at, mask=mask, other=0.0)
        else:
            lo = tl.load(lo_at, mask=mask, other=0)
            acc = _accumulator(tl.load(at, mask=mask, other=0), lo)
    for step in range(tl.cdiv(K, BK)):
        ks = (step * BK + tl.arange(0, BK)).to(tl.int64)
        a_at = a_ptr + rows.to(tl.int64)[:, None] * stride_am + ks[None, :] * stride_ak
        b_at = b_ptr + ks[:, None] * stride_b + cols[None, :]
        a = tl.load(a_at, mask=(rows < M)[:, None] & (ks < K)[None, :], other=0.0)
        b = tl.load(b_at, mask=(ks < K)[:, None] & (cols < N)[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    if SCALED:
        acc *= _row_scale(scale_ptr, row, M, BM)
    if WIDE:
        tl.store(at, acc, mask=mask)
    elif LAST:
        tl.store(at, acc.to(OUT).to(tl.int16, bitcast=True), mask=mask)
    else:
        bits = acc.to(tl.int32, bitcast=True)
        tl.store(at, (bits >> 16).to(tl.int16), mask=mask)
        tl.store(lo_at, bits.to(tl.int16), mask=mask)
