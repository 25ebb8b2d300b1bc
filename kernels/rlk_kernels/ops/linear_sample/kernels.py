"""`linear_sample` on Triton. For each chunk of columns a product writes logits, and
`_draw_blocks_kernel` reads them while they are in the L2 cache; the next chunk overwrites them.
`_finish_kernel` takes a block of each row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.launching import ShapeCache, cdiv, launch, shape_cache
from rlk_kernels.matmul.plan import recorded_implementation
from rlk_kernels.matmul.product import product
from rlk_kernels.memory import empty
from rlk_kernels.numerics.lse_tree.kernels import NO_COLUMNS, leaf_stats, merge_neighbours
from rlk_kernels.ops.overlap import begin_overlapped
from rlk_kernels.ops.sample.kernels import new_results
from rlk_kernels.ops.sample.plan import WARPS, Blocks, blocks_of
from rlk_kernels.ops.sample.walk_kernels import (
    divided,
    store_row,
    uniforms,
    walk,
    walk_leaves,
)

LOGITS_BYTES = 16 << 20
"""The most bytes of logits in memory at a time, or those of a block of `ROWS` rows. No bit depends
on them."""
ROWS = 1024
"""The most rows whose logits are computed at a time."""


@triton.jit(do_not_specialize=["first"])
def _draw_blocks_kernel(
    x_ptr, temperature_ptr, keys_ptr, positions_ptr, nodes_ptr, raw_ptr, counts_ptr, columns_ptr,
    logits_ptr, V, nodes, first,
    BLOCK: tl.constexpr, LEAVES: tl.constexpr, LEVELS: tl.constexpr, RAW: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """The node of each block of the logits x[T, V] of a chunk, whose first block is the row's block
    `first`; the number of its columns above -inf; the column that is drawn if the walk reaches this
    node, at temperature 0 the first of the largest; and the logit of this column. RAW: also the
    node at temperature 1."""
    begin_overlapped(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    here = row * nodes + first + block
    x_ptr += row * V
    temperature = tl.load(temperature_ptr + row)
    u = uniforms(tl.load(keys_ptr + row), tl.load(positions_ptr + row))
    cols = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
    tl.store(counts_ptr + here, tl.sum((x > float("-inf")).to(tl.int32), 0))
    largest = tl.min(tl.where(x == tl.max(x, 0), cols, V - 1), 0)
    n, s, drawn = walk_leaves(divided(x, temperature), cols, u, LEAVES)
    n, s, drawn = walk(n, s, drawn, u, LEAVES, LEVELS, 4)
    at = nodes_ptr + here * 2 + tl.zeros((1,), tl.int32)
    tl.store(at, n)
    tl.store(at + 1, s)
    # A block without a distribution leads beyond the last column.
    drawn = tl.minimum(tl.sum(drawn, 0), V - 1)
    drawn = tl.where(temperature == 0.0, largest, drawn)
    tl.store(columns_ptr + here, first * BLOCK + drawn)
    tl.store(logits_ptr + here, tl.load(x_ptr + drawn).to(tl.float32))
    if RAW:
        n, s, _, _ = leaf_stats(x, 1, LEAVES, False)
        n, s, _ = merge_neighbours(n, s, s, 1, LEAVES, LEVELS, False)
        at = raw_ptr + here * 2 + tl.zeros((1, 1), tl.int32)
        tl.store(at, n)
        tl.store(at + 1, s)


@triton.jit
def _finish_kernel(
    temperature_ptr, keys_ptr, positions_ptr, nodes_ptr, raw_ptr, counts_ptr, columns_ptr,
    logits_ptr, ids_ptr, logprobs_ptr, kept_ptr, mass_ptr, raw_logprobs_ptr, nodes,
    LEVELS: tl.constexpr, ROW_LEVELS: tl.constexpr, RAW: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The walk to a block of the row, and the column that was drawn there."""
    begin_overlapped(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    u = uniforms(tl.load(keys_ptr + row), tl.load(positions_ptr + row))
    block = tl.arange(0, 1 << ROW_LEVELS)
    known = block < nodes
    at = row * nodes + block
    n = tl.load(nodes_ptr + at * 2, mask=known, other=NO_COLUMNS)
    s = tl.load(nodes_ptr + at * 2 + 1, mask=known, other=0.0)
    kept = tl.sum(tl.load(counts_ptr + at, mask=known, other=0), 0)
    n, s, chosen = walk(n, s, block, u, 1 << ROW_LEVELS, ROW_LEVELS, LEVELS + 4)
    n, s, chosen = tl.sum(n, 0), tl.sum(s, 0), tl.minimum(tl.sum(chosen, 0), nodes - 1)
    tops = tl.load(logits_ptr + at, mask=known, other=float("-inf"))  # at temperature 0
    largest = tl.min(tl.where(tops == tl.max(tops, 0), block, nodes - 1), 0)
    chosen = row * nodes + tl.where(temperature == 0.0, largest, chosen)
    store_row(
        row, tl.load(columns_ptr + chosen), tl.load(logits_ptr + chosen), temperature, n, s, kept,
        1.0, raw_ptr, nodes, ids_ptr, logprobs_ptr, kept_ptr, mass_ptr, raw_logprobs_ptr,
        ROW_LEVELS, RAW,
    )  # fmt: skip


def chunk_columns(rows: int, v: int, block: int, itemsize: int) -> int:
    """The columns of a chunk, whole blocks: chunks have about the same size."""
    most = max(1, LOGITS_BYTES // (rows * block * itemsize))
    blocks = cdiv(v, block)
    return cdiv(blocks, cdiv(blocks, most)) * block


def linear_sample(
    h: Tensor, w: Tensor, bias: Tensor | None, keys: Tensor, positions: Tensor,
    temperature: Tensor, dtype: torch.dtype, raw: bool,
) -> tuple[tuple[Tensor, ...], str]:  # fmt: skip
    """((ids, logprobs, kept, mass, raw logprobs), the implementation that ran)."""
    t, ran = h.shape[0], set()
    results = new_results(t, raw, h.device)
    blocks = blocks_of(w.shape[0], h.device)
    cache = shape_cache("linear_sample", w.shape[0], dtype, raw, h.device)
    for first in range(0, t, ROWS):
        part = slice(first, first + ROWS)
        requests = temperature[part], keys[part], positions[part]
        into = tuple(x[part] for x in results)
        ran |= _sample_rows(cache, blocks, h[part], w, bias, requests, dtype, raw, into)
    return results, recorded_implementation(ran)


def _sample_rows(
    cache: ShapeCache, blocks: Blocks, h: Tensor, w: Tensor, bias: Tensor | None,
    requests: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype, raw: bool,
    into: tuple[Tensor, ...],
) -> set[str]:  # fmt: skip
    """Fills the results `into` of at most ROWS rows; returns the implementations that ran."""
    (t, v), device, ran = (h.shape[0], w.shape[0]), h.device, set()
    columns = chunk_columns(t, v, blocks.columns, dtype.itemsize)
    memory = empty((t * min(columns, v),), dtype, device)
    of_blocks = (
        empty((t, blocks.count, 2), torch.float32, device),
        empty((t, blocks.count, 2), torch.float32, device) if raw else None,
        *(empty((t, blocks.count), x, device) for x in (torch.int32, torch.int32, torch.float32)),
    )  # the arguments of the kernels from `nodes_ptr` to `logits_ptr`
    for first in range(0, v, columns):
        width = min(columns, v - first)
        part = slice(first, first + width)
        logits = memory[: t * width].view(t, width)
        of_part = None if bias is None else bias[part]
        ran.add(product(h, w[part], of_part, False, True, logits))
        launch(
            cache, _draw_blocks_kernel, (t, cdiv(width, blocks.columns), 1),
            (logits, *requests, *of_blocks, width, blocks.count, first // blocks.columns,
             blocks.columns, blocks.leaves, blocks.levels, raw, blocks.overlaps),
            {"num_warps": WARPS, "launch_pdl": blocks.overlaps}, (width,),
        )  # fmt: skip
    launch(
        cache, _finish_kernel, (t, 1, 1),
        (*requests, *of_blocks, *into, blocks.count, blocks.levels, blocks.row_levels, raw,
         blocks.overlaps),
        {"num_warps": 1, "launch_pdl": blocks.overlaps},
    )  # fmt: skip
    return ran
