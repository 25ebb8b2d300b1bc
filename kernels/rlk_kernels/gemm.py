# ruff: noqa: SIM108 (a ternary of two shapes is no Triton)
"""The matrix product under `linear`, its gradients, and fused operators built on it.

    C[m, n] = round( sum_{k = 0, 1, ...} A[m, k] * B[k, n]  (+ bias[n]) )

Order: one fp32 accumulator per element, K from front to back in the tensor core's own steps of 16
(fp16, bf16) or one by one (fp32, IEEE products, no tf32); in chains (`chains.py`) where the result
of 16-bit products is fp32 and K is long. There is no split of K, so nothing about an element's sum
depends on M, on the tile, or on the other rows. bf16 and fp16 tiles of every
shape in `tiles.py` give the same fp32 bits; `cornerstone.py` checks that on the machine at hand
before the table is trusted, and one tile is used where it does not hold.

Portable backend: exact sums (see `exact.py`), which no order can change.

Tiles: chosen from M, N and K (`tiles.py`). Hopper and newer read operands with TMA (host-side
descriptors); other GPUs, and tensors that TMA cannot address (rows not a multiple of 16 bytes),
take the pointer kernel, which has the same order and the same bits. Ampere and Ada run the pointer
kernel by design; they have not been tested.

A[M, K]: `a`, or `a` transposed (trans_a)   B[K, N]: `b`, or `b` transposed (trans_b)
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rlk_kernels.backend import interpreting, overlapping
from rlk_kernels.chains import begins, chains, put_aside
from rlk_kernels.exact import matmul_nt
from rlk_kernels.tiles import Tile, for_chains, tile_for

PORTABLE_BLOCK = 16384
"""Columns of B that the portable backend holds in float64 at a time (memory only, not bits)."""


@triton.jit
def _tile_position(tile, M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Row tile and column tile of the `tile`-th piece of work, GROUP row tiles at a time."""
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    per_group = GROUP * tiles_n
    first = (tile // per_group) * GROUP
    size = tl.minimum(tiles_m - first, GROUP)
    within = tile % per_group
    return first + within % size, within // size


@triton.jit
def _store_tile(
    acc, c_ptr, c_desc, bias_ptr, row, col, M, N, stride_cm,
    BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, TMA_STORE: tl.constexpr,
):  # fmt: skip
    cols = col + tl.arange(0, BN)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    if TMA_STORE:
        c_desc.store([row, col], acc.to(c_desc.dtype))
    else:
        rows = row + tl.arange(0, BM)
        where = c_ptr + rows.to(tl.int64)[:, None] * stride_cm + cols[None, :]
        mask = (rows[:, None] < M) & (cols[None, :] < N)
        tl.store(where, acc.to(c_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _gemm_tma_kernel(
    a_desc, b_desc, b2_desc, c_desc, c2_desc, c_ptr, bias_ptr, M, N, K, last, N1, stride_cm,
    TRANS_A: tl.constexpr, TRANS_B: tl.constexpr, HAS_BIAS: tl.constexpr, TMA_STORE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BN2: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    SUBTILE: tl.constexpr, FLATTEN: tl.constexpr, SWAP: tl.constexpr, OVERLAP: tl.constexpr,
    TAIL: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    if OVERLAP > 0:
        tl.extra.cuda.gdc_wait()
    if OVERLAP == 1:
        tl.extra.cuda.gdc_launch_dependents()
    tiles = tl.cdiv(M, BM) * tl.cdiv(N1, BN + BN2)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n = _tile_position(tile, M, N1, BM, BN + BN2, GROUP)
        row = tile_m * BM
        col = tile_n * (BN + BN2)
        if SWAP:
            acc = tl.zeros((BN, BM), tl.float32)
        else:
            acc = tl.zeros((BM, BN), tl.float32)
        if BN2 > 0:
            acc2 = tl.zeros((BM, BN2), tl.float32)
        if CHAIN > 0:
            aside = tl.zeros_like(acc)
        for step in range(tl.cdiv(K, BK)):
            k = step * BK
            if CHAIN > 0 and begins(k, CHAIN, last):
                acc, aside = put_aside(acc, aside)
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
            if BN2 > 0:
                if TRANS_B:
                    b2 = b2_desc.load([col + BN, k]).T
                else:
                    b2 = b2_desc.load([k, col + BN])
                acc2 = tl.dot(a, b2, acc2)
        if CHAIN > 0:
            acc += aside
        if SWAP:
            acc = acc.T
        if SUBTILE:
            halves = tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1))
            left, right = tl.split(halves)
            _store_tile(
                left, c_ptr, c_desc, bias_ptr, row, col, M, N, stride_cm,
                BM, BN // 2, HAS_BIAS, TMA_STORE,
            )  # fmt: skip
            _store_tile(
                right, c_ptr, c_desc, bias_ptr, row, col + BN // 2, M, N, stride_cm,
                BM, BN // 2, HAS_BIAS, TMA_STORE,
            )  # fmt: skip
        else:
            _store_tile(
                acc, c_ptr, c_desc, bias_ptr, row, col, M, N, stride_cm,
                BM, BN, HAS_BIAS, TMA_STORE,
            )  # fmt: skip
        if BN2 > 0:
            _store_tile(
                acc2, c_ptr, c2_desc, bias_ptr, row, col + BN, M, N, stride_cm,
                BM, BN2, HAS_BIAS, TMA_STORE,
            )  # fmt: skip
    if TAIL > 0:  # the columns from N1 on, in narrower tiles: processors end together
        mine = tl.maximum(tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0)), 0)
        start = tl.program_id(0) + mine * tl.num_programs(0) - tiles
        rest = tl.cdiv(M, BM) * tl.cdiv(N - N1, TAIL)
        for tile in tl.range(start, rest, tl.num_programs(0)):
            tile_m, tile_n = _tile_position(tile, M, N - N1, BM, TAIL, GROUP)
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
                BM, TAIL, HAS_BIAS, TMA_STORE,
            )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _gemm_pointer_kernel(
    a_ptr, b_ptr, c_ptr, bias_ptr, M, N, K, last,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm,
    HAS_BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = _tile_position(tl.program_id(0), M, N, BM, BN, GROUP)
    rows = tile_m * BM + tl.arange(0, BM)
    cols = tile_n * BN + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    a_at = a_ptr + rows.to(tl.int64)[:, None] * stride_am + ks.to(tl.int64)[None, :] * stride_ak
    b_at = b_ptr + ks.to(tl.int64)[:, None] * stride_bk + cols.to(tl.int64)[None, :] * stride_bn
    acc = tl.zeros((BM, BN), tl.float32)
    if CHAIN > 0:
        aside = tl.zeros_like(acc)
    for step in range(tl.cdiv(K, BK)):
        left = K - step * BK
        if CHAIN > 0 and begins(step * BK, CHAIN, last):
            acc, aside = put_aside(acc, aside)
        a = tl.load(a_at, mask=(rows[:, None] < M) & (ks[None, :] < left), other=0.0)
        b = tl.load(b_at, mask=(ks[:, None] < left) & (cols[None, :] < N), other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_at += BK * stride_ak
        b_at += BK * stride_bk
    if CHAIN > 0:
        acc += aside
    _store_tile(
        acc, c_ptr, c_ptr, bias_ptr, tile_m * BM, tile_n * BN, M, N, stride_cm,
        BM, BN, HAS_BIAS, False,
    )  # fmt: skip


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _has_tma(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def _runs_apart(device: torch.device) -> bool:
    """Whether `gemm_hopper.py` runs: Gluon changes with every Triton, and it is written for 3.6.

    Elsewhere its tiles take the kernel of this file, with the same bits.
    """
    on_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return on_hopper and triton.__version__.startswith("3.6.")


def _fills_hopper(a: Tensor, b: Tensor, out: Tensor) -> bool:
    """Whether sums in chains are those of `linear_logp_hopper.py`: many tiles of 128 x 256."""
    m, n = out.shape
    if m <= 64 or not _runs_apart(a.device):
        return False
    many = 2 * triton.cdiv(m, 128) * triton.cdiv(n, 256) >= _processors(a.device)
    plain = out.dtype == torch.float32 and out.is_contiguous()
    return many and plain and _tma_can_read(a) and _tma_can_read(b)


def _tma_can_read(x: Tensor) -> bool:
    row_bytes = x.stride(0) * x.element_size()
    return (
        x.stride(1) == 1 and x.data_ptr() % 16 == 0 and row_bytes % 16 == 0 and row_bytes > 0
        and x.shape[1] <= x.stride(0)
    )  # fmt: skip


def _wide_columns(tile: Tile, m: int, n: int, processors: int) -> int:
    """The columns that tiles of full width cover: with a tail, those of the full waves."""
    if not tile.tail:
        return n
    rows = triton.cdiv(m, tile.m)
    waves = rows * (n // tile.n) // processors
    return (waves * processors // rows if waves else n // tile.n) * tile.n


def gemm_triton(
    a: Tensor, b: Tensor, bias: Tensor | None, trans_a: bool, trans_b: bool, out: Tensor,
    tile: Tile | None = None, pointers: bool = False,
) -> Tensor:  # fmt: skip
    """Fill out[M, N] with A @ B (+ bias) and return it; `tile` and `pointers` are for tests."""
    m, n = out.shape
    k = a.shape[0] if trans_a else a.shape[1]
    if m == 0 or n == 0:
        return out
    chain, last = chains(k, a.dtype, out.dtype)
    if tile is None:
        from rlk_kernels.cornerstone import holds  # the check itself runs this function

        trusted = a.dtype == torch.float32 or interpreting() or holds(a.device, chain > 0)
        tile = tile_for(m, n, k, a.dtype, trusted)
        if chain and trusted and not trans_a and trans_b and _fills_hopper(a, b, out):
            from rlk_kernels.linear_logp_hopper import chained_sums

            chained_sums(a, b, bias, out, chain, last, _processors(a.device))
            return out
    if chain:
        tile = for_chains(tile)
    half = a.element_size() == 2
    if not pointers and half and k and _has_tma(a.device) and _tma_can_read(a) and _tma_can_read(b):
        wide = _wide_columns(tile, m, n, _processors(a.device))
        tiles = triton.cdiv(m, tile.m) * triton.cdiv(wide, tile.n + tile.n2)
        if tile.tail:
            tiles += triton.cdiv(m, tile.m) * triton.cdiv(n - wide, tile.tail)
        tma_store = n * out.element_size() % 16 == 0 and out.data_ptr() % 16 == 0
        a_desc = TensorDescriptor.from_tensor(a, [tile.k, tile.m] if trans_a else [tile.m, tile.k])
        b_desc = TensorDescriptor.from_tensor(b, [tile.n, tile.k] if trans_b else [tile.k, tile.n])
        b2_desc, c_desc, c2_desc = b_desc, out, out
        narrow = tile.tail or tile.n2
        if narrow:
            box = [narrow, tile.k] if trans_b else [tile.k, narrow]
            b2_desc = TensorDescriptor.from_tensor(b, box)
        if tma_store:
            box = [tile.m, tile.n // 2 if tile.subtile else tile.n]
            c_desc = c2_desc = TensorDescriptor.from_tensor(out, box)
            if narrow:
                c2_desc = TensorDescriptor.from_tensor(out, [tile.m, narrow])
        # an fp32 output tile takes the shared memory of one stage more
        overlap = tile.overlap if overlapping(a.device) else 0
        stages = tile.stages if out.element_size() == 2 else max(2, tile.stages - 1)
        if tile.apart and tma_store and trans_b and not trans_a and _runs_apart(a.device):
            from rlk_kernels.gemm_hopper import one_wave

            one_wave(a, b, bias, out, tile, stages, overlap)
            return out
        _gemm_tma_kernel[(min(tiles, _processors(a.device)),)](
            a_desc, b_desc, b2_desc, c_desc, c2_desc, out, bias, m, n, k, last, wide, out.stride(0),
            trans_a, trans_b, bias is not None, tma_store,
            tile.m, tile.n, tile.n2, tile.k, tile.group, tile.subtile, tile.flatten, tile.swap,
            overlap, tile.tail, chain, num_warps=tile.warps, num_stages=stages,
            launch_pdl=overlap > 0,
        )  # fmt: skip
        return out
    tiles = triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n)
    a_m, a_k = (a.stride(1), a.stride(0)) if trans_a else (a.stride(0), a.stride(1))
    b_k, b_n = (b.stride(1), b.stride(0)) if trans_b else (b.stride(0), b.stride(1))
    _gemm_pointer_kernel[(tiles,)](
        a, b, out, bias, m, n, k, last, a_m, a_k, b_k, b_n, out.stride(0), bias is not None,
        tile.m, tile.n, tile.k, tile.group, "ieee", chain,
        num_warps=tile.warps, num_stages=min(tile.stages, 3),
    )  # fmt: skip
    return out


def gemm_portable(
    a: Tensor, b: Tensor, bias: Tensor | None, trans_a: bool, trans_b: bool, dtype: torch.dtype
) -> Tensor:
    """A @ B (+ bias) with exact sums, rounded to float32 and then to `dtype`."""
    a = a.mT if trans_a else a
    b = b if trans_b else b.mT
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    out = torch.empty(a.shape[0], b.shape[0], dtype=dtype, device=a.device)
    for start in range(0, b.shape[0], PORTABLE_BLOCK):
        stop = min(start + PORTABLE_BLOCK, b.shape[0])
        block = matmul_nt(a, b[start:stop])
        if bias is not None:
            block += bias[start:stop].double()
        out[:, start:stop] = block.to(wide).to(dtype)
    return out
