"""The Triton kernels of `group_by_expert`: a stable counting sort, in one launch for few rows and
in three for many. Counts are integers, so the order of their additions does not matter.

C = rows of a chunk   BE >= E + 2: dropped rows have bin E, indices after the last row have E + 1
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.device import facts
from rlk_kernels.launching import cdiv, launch, power_of_2, shape_cache
from rlk_kernels.memory import empty
from rlk_kernels.ops.overlap import begin_overlapped

FEW = (32, 128, 256)
"""The numbers of rows that one program can sort; the smallest that suffices is used."""
CHUNK = 128
"""Rows of a program where there are more rows."""
SCANNED, COLUMNS = 128, 16
"""Chunks and experts of a step of the scan."""


@triton.jit
def _chunk(ids_ptr, chunk, S, E, C: tl.constexpr):
    """(the rows of a chunk, their bins)."""
    rows = chunk * C + tl.arange(0, C)
    expert = tl.load(ids_ptr + rows, mask=rows < S, other=0)
    expert = tl.where((expert >= 0) & (expert < E), expert, E)
    return rows, tl.where(rows < S, expert, E + 1)


@triton.jit
def _place(
    rows, bins, total, before, order_ptr, offsets_ptr, chunk, S, E, C: tl.constexpr,
    BE: tl.constexpr,
):  # fmt: skip
    """Write the rows of a chunk into `order`. total[BE]: the rows of each expert; before[C]: those
    in earlier chunks. The first chunk writes the offsets of the experts."""
    begin = tl.cumsum(total, 0) - total
    # the number of earlier rows of this chunk with the same expert
    i = tl.arange(0, C)
    same = tl.reshape(bins, (C, 1)) == tl.reshape(bins, (1, C))
    rank = tl.sum((same & (i[None, :] < i[:, None])).to(tl.int32), 1)
    at = tl.gather(begin, bins, 0) + before + rank
    tl.store(order_ptr + at, rows, mask=rows < S)
    if chunk == 0:
        experts = tl.arange(0, BE)
        tl.store(offsets_ptr + experts, begin, mask=experts <= E)


@triton.jit(do_not_specialize=["S"])
def _group_few_kernel(
    ids_ptr, order_ptr, offsets_ptr, S, E, C: tl.constexpr, BE: tl.constexpr, OVERLAP: tl.constexpr
):
    begin_overlapped(OVERLAP)
    rows, bins = _chunk(ids_ptr, 0, S, E, C)
    total = tl.histogram(bins, BE)
    before = tl.zeros((C,), tl.int32)
    _place(rows, bins, total, before, order_ptr, offsets_ptr, 0, S, E, C, BE)


@triton.jit(do_not_specialize=["S"])
def _count_kernel(
    ids_ptr, counts_ptr, S, E, C: tl.constexpr, BE: tl.constexpr, OVERLAP: tl.constexpr
):
    begin_overlapped(OVERLAP)
    chunk = tl.program_id(0)
    _, bins = _chunk(ids_ptr, chunk, S, E, C)
    tl.store(counts_ptr + chunk.to(tl.int64) * BE + tl.arange(0, BE), tl.histogram(bins, BE))


@triton.jit(do_not_specialize=["chunks"])
def _scan_kernel(
    counts_ptr, total_ptr, chunks, N: tl.constexpr, COLUMNS: tl.constexpr, BE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Replace the counts of each chunk by those of all chunks before it, and write the totals."""
    begin_overlapped(OVERLAP)
    experts = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.int32)
    for start in range(0, chunks, N):
        at = start + tl.arange(0, N)
        where = counts_ptr + at.to(tl.int64)[:, None] * BE + experts[None, :]
        counts = tl.load(where, mask=at[:, None] < chunks, other=0)
        before = tl.cumsum(counts, 0) - counts + total[None, :]
        tl.store(where, before, mask=at[:, None] < chunks)
        total += tl.sum(counts, 0)
    tl.store(total_ptr + experts, total)


@triton.jit(do_not_specialize=["S"])
def _place_kernel(
    ids_ptr, counts_ptr, total_ptr, order_ptr, offsets_ptr, S, E, C: tl.constexpr,
    BE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin_overlapped(OVERLAP)
    chunk = tl.program_id(0)
    rows, bins = _chunk(ids_ptr, chunk, S, E, C)
    before = tl.load(counts_ptr + chunk.to(tl.int64) * BE + bins)
    total = tl.load(total_ptr + tl.arange(0, BE))
    _place(rows, bins, total, before, order_ptr, offsets_ptr, chunk, S, E, C, BE)


def group(ids: Tensor, experts: int, few: tuple[int, ...] = FEW) -> tuple[Tensor, Tensor]:
    """(order, offsets) of `ExpertGroups`, in one launch for up to the last of `few` rows."""
    rows, bins, device = ids.numel(), power_of_2(experts + 2), ids.device
    order = empty((rows,), torch.int32, device)
    offsets = empty((experts + 1,), torch.int32, device)
    chunk = next((most for most in few if rows <= most), CHUNK)
    cache = shape_cache("group_by_expert", experts, chunk, device)
    overlap = facts(device).overlaps
    options = {"num_warps": chunk // 32, "launch_pdl": overlap}
    sizes = (rows, experts, chunk, bins, overlap)
    if rows <= max(few, default=0):
        launch(cache, _group_few_kernel, (1, 1, 1), (ids, order, offsets, *sizes), options)
        return order, offsets
    chunks, columns = cdiv(rows, chunk), min(COLUMNS, bins)
    counts = empty((chunks + 1, bins), torch.int32, device)
    total = counts[chunks:]
    launch(cache, _count_kernel, (chunks, 1, 1), (ids, counts, *sizes), options)
    scanned = (counts, total, chunks, SCANNED, columns, bins, overlap)
    launch(cache, _scan_kernel, (bins // columns, 1, 1), scanned, options)
    placed = (ids, counts, total, order, offsets, *sizes)
    launch(cache, _place_kernel, (chunks, 1, 1), placed, options)
    return order, offsets
