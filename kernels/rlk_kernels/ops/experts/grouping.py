"""The Triton kernels of `group_by_expert`: a stable counting sort, one launch for few rows, three
for many. C = rows of a chunk; a program compares them with all experts at once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.launching import cdiv, launch, power_of_2, shape_cache
from rlk_kernels.memory import empty

CHUNK = 64
MANY_CHUNK = 128
"""A chunk of more than `MANY` rows: the scan over chunks is what takes long."""
MANY = 16384
FEW = 128
"""Rows up to which one program sorts them all."""
SCANNED = 64
"""Chunks that the scan takes at a time."""


@triton.jit
def _one_hot(ids_ptr, start, S, E, C: tl.constexpr, BE: tl.constexpr):
    """int32 [C, BE]: which expert each row of a chunk has; column E: none."""
    rows = start + tl.arange(0, C)
    expert = tl.load(ids_ptr + rows, mask=rows < S, other=0)
    expert = tl.where((expert >= 0) & (expert < E), expert, E)
    hits = (expert[:, None] == tl.arange(0, BE)[None, :]) & (rows[:, None] < S)
    return rows, hits.to(tl.int32)


@triton.jit
def _place(hits, first, rows, order_ptr, S):
    """Write a chunk's rows to where its experts' rows begin, `first` [BE]."""
    before = tl.cumsum(hits, 0) - hits
    at = tl.sum(hits * (before + first[None, :]), 1)
    tl.store(order_ptr + at, rows, mask=rows < S)


@triton.jit(do_not_specialize=["S"])
def _group_few_kernel(ids_ptr, order_ptr, offsets_ptr, S, E, C: tl.constexpr, BE: tl.constexpr):
    experts = tl.arange(0, BE)
    count = tl.zeros((BE,), tl.int32)
    for start in range(0, S, C):
        _, hits = _one_hot(ids_ptr, start, S, E, C, BE)
        count += tl.sum(hits, 0)
    first = tl.cumsum(count, 0) - count
    tl.store(offsets_ptr + experts, first, mask=experts <= E)
    for start in range(0, S, C):
        rows, hits = _one_hot(ids_ptr, start, S, E, C, BE)
        _place(hits, first, rows, order_ptr, S)
        first += tl.sum(hits, 0)


@triton.jit(do_not_specialize=["S"])
def _count_kernel(ids_ptr, counts_ptr, S, E, C: tl.constexpr, BE: tl.constexpr):
    chunk = tl.program_id(0)
    _, hits = _one_hot(ids_ptr, chunk * C, S, E, C, BE)
    tl.store(counts_ptr + chunk.to(tl.int64) * BE + tl.arange(0, BE), tl.sum(hits, 0))


@triton.jit(do_not_specialize=["chunks"])
def _scan_kernel(counts_ptr, offsets_ptr, chunks, E, N: tl.constexpr, BE: tl.constexpr):
    """Counts of each chunk -> where its rows of each expert go."""
    experts = tl.arange(0, BE)
    total = tl.zeros((BE,), tl.int32)
    for start in range(0, chunks, N):
        at = start + tl.arange(0, N)
        where = counts_ptr + at.to(tl.int64)[:, None] * BE + experts[None, :]
        total += tl.sum(tl.load(where, mask=at[:, None] < chunks, other=0), 0)
    first = tl.cumsum(total, 0) - total
    tl.store(offsets_ptr + experts, first, mask=experts <= E)
    for start in range(0, chunks, N):
        at = start + tl.arange(0, N)
        where = counts_ptr + at.to(tl.int64)[:, None] * BE + experts[None, :]
        counts = tl.load(where, mask=at[:, None] < chunks, other=0)
        before = tl.cumsum(counts, 0) - counts + first[None, :]
        tl.store(where, before, mask=at[:, None] < chunks)
        first += tl.sum(counts, 0)


@triton.jit(do_not_specialize=["S"])
def _place_kernel(ids_ptr, counts_ptr, order_ptr, S, E, C: tl.constexpr, BE: tl.constexpr):
    chunk = tl.program_id(0)
    rows, hits = _one_hot(ids_ptr, chunk * C, S, E, C, BE)
    first = tl.load(counts_ptr + chunk.to(tl.int64) * BE + tl.arange(0, BE))
    _place(hits, first, rows, order_ptr, S)


def group(ids: Tensor, experts: int, few: int = FEW) -> tuple[Tensor, Tensor]:
    """(order, offsets) of `ExpertGroups`; up to `few` rows in one launch."""
    rows, block, device = ids.numel(), power_of_2(experts + 1), ids.device
    order = empty((rows,), torch.int32, device)
    offsets = empty((experts + 1,), torch.int32, device)
    cache = shape_cache("group_by_expert", experts, device)
    options = {"num_warps": 4}
    if rows <= few:
        arguments = (ids, order, offsets, rows, experts, CHUNK, block)
        launch(cache, _group_few_kernel, (1, 1, 1), arguments, options)
        return order, offsets
    chunk = MANY_CHUNK if rows > MANY else CHUNK
    chunks = cdiv(rows, chunk)
    counts = empty((chunks, block), torch.int32, device)
    sizes = (rows, experts, chunk, block)
    wide = {"num_warps": 8}
    launch(cache, _count_kernel, (chunks, 1, 1), (ids, counts, *sizes), wide, (chunk,))
    scanned = (counts, offsets, chunks, experts, SCANNED, block)
    launch(cache, _scan_kernel, (1, 1, 1), scanned, wide)
    launch(cache, _place_kernel, (chunks, 1, 1), (ids, counts, order, *sizes), wide, (chunk,))
    return order, offsets
