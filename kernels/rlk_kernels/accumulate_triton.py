# ruff: noqa: SIM108 (a ternary of two shapes is no Triton)
"""The Triton kernels of `accumulate.py`, and its piece of work.

Between calls the accumulator of a 16-bit output lies in two halves: the upper 16 bits of each fp32
number in the output itself, the lower 16 in `low`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rlk_kernels.backend import interpreting
from rlk_kernels.gemm import _has_tma, _processors, _tile_position, _tma_can_read, gemm_triton
from rlk_kernels.tiles import FLOAT32, INTERPRETED, SAFE, Tile


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """One piece of K: out[M, N] (contiguous) goes on from where the piece before it stopped."""

    a: Tensor
    b: Tensor
    out: Tensor
    low: Tensor
    """`low_halves` of out."""
    trans_a: bool
    first: bool
    last: bool
    scale: Tensor | None = None
    """[M], only with the last piece: a row's sums times a number, before they are rounded."""
    rows: int = 0
    """Of the tensor whose rows out is, where they may be cut otherwise by another piece; 0: M."""


@triton.jit
def _joined(high, low):
    bits = (high.to(tl.int32) << 16) | (low.to(tl.int32) & 0xFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _places(base, row, col, N, BM: tl.constexpr, BN: tl.constexpr):
    rows = (row + tl.arange(0, BM)).to(tl.int64)
    cols = col + tl.arange(0, BN)
    return base + rows[:, None] * N + cols[None, :]


@triton.jit
def _row_scale(scale_ptr, row, M, BM: tl.constexpr):
    rows = row + tl.arange(0, BM)
    return tl.load(scale_ptr + rows, mask=rows < M, other=0.0)[:, None]


@triton.jit(do_not_specialize=["M", "K"])
def _sum_tma_kernel(
    a_desc, b_desc, c_desc, low_desc, scale_ptr, M, N, K,
    TRANS_A: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, OUT: tl.constexpr,
    SCALED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # a program goes on to its next tile while the one before is still on its way to memory
    tiles = tl.cdiv(M, BM) * tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        tile_m, tile_n = _tile_position(tile, M, N, BM, BN, GROUP)
        row = tile_m * BM
        col = tile_n * BN
        if FIRST:
            acc = tl.zeros((BM, BN), tl.float32)
        else:
            acc = _joined(c_desc.load([row, col]), low_desc.load([row, col]))
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
            low_desc.store([row, col], bits.to(tl.int16))


@triton.jit(do_not_specialize=["M", "K"])
def _sum_pointer_kernel(
    a_ptr, b_ptr, c_ptr, low_ptr, scale_ptr, M, N, K, stride_am, stride_ak, stride_b,
    FIRST: tl.constexpr, LAST: tl.constexpr, WIDE: tl.constexpr, OUT: tl.constexpr,
    SCALED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = _tile_position(tl.program_id(0), M, N, BM, BN, GROUP)
    row = tile_m * BM
    col = tile_n * BN
    rows = row + tl.arange(0, BM)
    cols = col + tl.arange(0, BN)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    at = _places(c_ptr, row, col, N, BM, BN)
    low_at = _places(low_ptr, row, col, N, BM, BN)
    if not FIRST:
        if WIDE:
            acc = tl.load(at, mask=mask, other=0.0)
        else:
            low = tl.load(low_at, mask=mask, other=0)
            acc = _joined(tl.load(at, mask=mask, other=0), low)
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
        tl.store(low_at, bits.to(tl.int16), mask=mask)


# tile, microseconds to start a wave of it, microseconds per unit of K and wave (see `tiles.py`)
_TILES = [
    (Tile(64, 64, 128, 4, 4), 1.9, 0.00228),
    (Tile(64, 128, 64, 4, 6), 2.7, 0.00314),
    (Tile(128, 128, 64, 8, 4), 2.7, 0.00528),
    (Tile(128, 256, 64, 8, 3, group=16), 3.3, 0.0103),
]


def tile_of(m: int, n: int, k: int, processors: int, trusted: bool) -> Tile:
    def time(entry: tuple[Tile, float, float]) -> float:
        tile, start, per_k = entry
        tiles = -(-m // tile.m) * -(-n // tile.n)
        return -(-tiles // processors) * (start + per_k * k)

    return min(_TILES, key=time)[0] if trusted else SAFE


def sum_triton(x: Sum) -> None:
    """`accumulate` of one piece."""
    a, b, out, low, scale = x.a, x.b, x.out, x.low, x.scale
    trans_a, first, last = x.trans_a, x.first, x.last
    if first and last and scale is None:
        gemm_triton(a, b, None, trans_a, False, out)
        return
    (m, n), k = out.shape, b.shape[0]
    wide = out.dtype == torch.float32
    sums = out if wide else out.view(torch.int16)
    kind = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(out.dtype, tl.float32)
    half = a.element_size() == 2 and not wide and _has_tma(a.device)
    if half and _tma_can_read(a) and _tma_can_read(b) and _tma_can_read(sums):
        from rlk_kernels.cornerstone import holds

        processors, trusted = _processors(a.device), holds(a.device)
        tile = tile_of(m, n, k, processors, trusted)
        a_box = [tile.k, tile.m] if trans_a else [tile.m, tile.k]
        tiles = triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n)
        high_desc = TensorDescriptor.from_tensor(sums, [tile.m, tile.n])
        low_desc = high_desc
        if not (first and last):
            low_desc = TensorDescriptor.from_tensor(low, [tile.m, tile.n])
        _sum_tma_kernel[(min(tiles, processors),)](
            TensorDescriptor.from_tensor(a, a_box),
            TensorDescriptor.from_tensor(b, [tile.k, tile.n]),
            high_desc, low_desc,
            scale, m, n, k, trans_a, first, last, kind, scale is not None,
            tile.m, tile.n, tile.k, tile.group, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return
    tile = FLOAT32 if a.dtype == torch.float32 else SAFE
    tile = INTERPRETED if interpreting() else tile
    strides = (a.stride(1), a.stride(0)) if trans_a else (a.stride(0), a.stride(1))
    _sum_pointer_kernel[(triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n),)](
        a, b, sums, low, scale, m, n, k, *strides, b.stride(0), first, last, wide, kind,
        scale is not None,
        tile.m, tile.n, tile.k, tile.group, num_warps=tile.warps, num_stages=min(tile.stages, 3),
    )  # fmt: skip
