"""The Triton kernels of `sample`. Without truncation there are two launches: `_blocks_kernel` reads
the logits, a block of columns in a program, and writes a node of each block; `_finish_kernel` walks
down to a block and reads it again. Truncation finds each row's cut first (`find_cuts.py`), and then
the nodes are those of the kept columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.launching import ShapeCache, launch, shape_cache
from rlk_kernels.memory import empty
from rlk_kernels.numerics.lse_tree.kernels import (
    NO_COLUMNS,
    leaf_stats_of_halves,
    merge_neighbours,
)
from rlk_kernels.ops.overlap import begin_overlapped
from rlk_kernels.ops.sample.find_cuts import Cuts, find_cuts
from rlk_kernels.ops.sample.plan import TREE_WARPS, WARPS, Blocks, blocks_of
from rlk_kernels.ops.sample.walk_kernels import (
    divided,
    is_kept,
    store_row,
    uniforms,
    walk,
    walk_leaves,
)


@triton.jit
def _halves(x_ptr, cols, V):
    """The halves [LEAVES, 8] of the leaves of a block; a thread's load has half a leaf."""
    left = tl.load(x_ptr + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
    right = tl.load(x_ptr + cols + 8, mask=cols + 8 < V, other=float("-inf")).to(tl.float32)
    return left, right


@triton.jit
def _store_node(at, left, right, LEAVES: tl.constexpr, LEVELS: tl.constexpr):
    n, s = leaf_stats_of_halves(left, right, LEAVES)
    n, s, _ = merge_neighbours(n, s, s, 1, LEAVES, LEVELS, False)
    at += tl.zeros((1, 1), tl.int32)
    tl.store(at, n)
    tl.store(at + 1, s)


@triton.jit
def _sum_of_halves(left, right):
    return tl.sum(tl.sum(left, 1) + tl.sum(right, 1), 0)


@triton.jit
def _blocks_kernel(
    x_ptr, temperature_ptr, nodes_ptr, raw_ptr, counts_ptr, tops_ptr, bottoms_ptr, cuts_ptr,
    cut_columns_ptr, stride_t, V, nodes,
    BLOCK: tl.constexpr, LEAVES: tl.constexpr, LEVELS: tl.constexpr, RAW: tl.constexpr,
    BOUNDS: tl.constexpr, CUT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The node of each block of columns, and the number of its kept columns. RAW: also the node at
    temperature 1. BOUNDS: also the largest and the smallest logit above -inf. CUT: only columns up
    to the row's cut are kept; a block without any, which its largest logit shows, is not read."""
    begin_overlapped(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    here = row * nodes + block
    temperature = tl.load(temperature_ptr + row)
    cut = float("-inf")
    if CUT:
        cut = tl.load(cuts_ptr + row)
        if tl.load(tops_ptr + here) < cut:
            tl.store(nodes_ptr + here * 2, NO_COLUMNS)
            tl.store(nodes_ptr + here * 2 + 1, 0.0)
            tl.store(counts_ptr + here, 0)
            return
    cols = block * BLOCK + tl.arange(0, LEAVES)[:, None] * 16 + tl.arange(0, 8)[None, :]
    left, right = _halves(x_ptr + row * stride_t, cols, V)
    low = float("-inf")
    if CUT:
        cut_column = tl.load(cut_columns_ptr + row)
        left = tl.where(is_kept(left, cols, cut, cut_column), left, low)
        right = tl.where(is_kept(right, cols + 8, cut, cut_column), right, low)
    else:
        top = tl.max(tl.max(tl.maximum(left, right), 1), 0)
        unknown = ((left != left) | (right != right)).to(tl.int32)
        # a maximum leaves a NaN out, and its block would then be passed over as below a cut
        top = tl.where(tl.max(tl.max(unknown, 1), 0) > 0, float("nan"), top)
        tl.store(tops_ptr + here, top)
    if BOUNDS:
        above = tl.minimum(
            tl.where(left > low, left, float("inf")), tl.where(right > low, right, float("inf"))
        )
        tl.store(bottoms_ptr + here, tl.min(tl.min(above, 1), 0))
    tl.store(
        counts_ptr + here, _sum_of_halves((left > low).to(tl.int32), (right > low).to(tl.int32))
    )
    if RAW:
        _store_node(raw_ptr + here * 2, left, right, LEAVES, LEVELS)
    z_left, z_right = divided(left, temperature), divided(right, temperature)
    _store_node(nodes_ptr + here * 2, z_left, z_right, LEAVES, LEVELS)


@triton.jit
def _finish_kernel(
    x_ptr, temperature_ptr, keys_ptr, positions_ptr, nodes_ptr, raw_ptr, counts_ptr, tops_ptr,
    cuts_ptr, cut_columns_ptr, roots_ptr, ids_ptr, logprobs_ptr, kept_ptr, mass_ptr,
    raw_logprobs_ptr, stride_t, V, nodes,
    BLOCK: tl.constexpr, LEAVES: tl.constexpr, LEVELS: tl.constexpr, ROW_LEVELS: tl.constexpr,
    RAW: tl.constexpr, CUT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The walk to a block of the row, and within it to a column."""
    begin_overlapped(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    greedy = temperature == 0.0
    u = uniforms(tl.load(keys_ptr + row), tl.load(positions_ptr + row))
    block = tl.arange(0, 1 << ROW_LEVELS)
    known = block < nodes
    at = nodes_ptr + (row * nodes + block) * 2
    n = tl.load(at, mask=known, other=NO_COLUMNS)
    s = tl.load(at + 1, mask=known, other=0.0)
    kept = tl.sum(tl.load(counts_ptr + row * nodes + block, mask=known, other=0), 0)
    n, s, chosen = walk(n, s, block, u, 1 << ROW_LEVELS, ROW_LEVELS, LEVELS + 4)
    n, s, chosen = tl.sum(n, 0), tl.sum(s, 0), tl.sum(chosen, 0)
    tops = tl.load(tops_ptr + row * nodes + block, mask=known, other=float("-inf"))
    top = tl.max(tops, 0)
    chosen = tl.where(greedy, tl.min(tl.where(tops == top, block, nodes - 1), 0), chosen)
    cols = chosen * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_t + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
    first = tl.min(tl.where(x == top, cols, V - 1), 0)
    if CUT:
        kept_here = is_kept(x, cols, tl.load(cuts_ptr + row), tl.load(cut_columns_ptr + row))
        x = tl.where(kept_here, x, float("-inf"))
    leaf_n, leaf_s, leaf = walk_leaves(divided(x, temperature), cols, u, LEAVES)
    _, _, drawn = walk(leaf_n, leaf_s, leaf, u, LEAVES, LEVELS, 4)
    id = tl.where(greedy, first, tl.sum(drawn, 0))
    x = tl.load(x_ptr + row * stride_t + tl.where(s > 0.0, id, 0)).to(tl.float32)
    mass = 1.0
    if CUT:
        root = roots_ptr + row * 2
        mass = tl.where(greedy, 1.0, tl.exp2(n - tl.load(root)) * s / tl.load(root + 1))
    store_row(
        row, id, x, temperature, n, s, kept, mass, raw_ptr, nodes, ids_ptr, logprobs_ptr, kept_ptr,
        mass_ptr, raw_logprobs_ptr, ROW_LEVELS, RAW,
    )  # fmt: skip


@triton.jit
def _mask_kernel(
    x_ptr, cuts_ptr, cut_columns_ptr, roots_ptr, out_ptr, stride_t, V, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Whether each column is kept."""
    begin_overlapped(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_t + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
    kept = is_kept(x, cols, tl.load(cuts_ptr + row), tl.load(cut_columns_ptr + row))
    exists = tl.load(roots_ptr + row * 2 + 1) > 0.0
    kept = kept & (x > tl.where(exists, float("-inf"), float("inf")))
    tl.store(out_ptr + row * V + cols, kept, mask=cols < V)


def _cache(name: str, logits: Tensor, *rest) -> ShapeCache:
    return shape_cache(
        name, logits.shape, logits.stride(0), logits.dtype, logits.device,
        *(None if x is None else getattr(x, "dtype", x) for x in rest),
    )  # fmt: skip


def _first_pass(
    cache: ShapeCache, cuts: Cuts, logits: Tensor, temperature: Tensor, blocks: Blocks,
    raw: Tensor | None, bounds: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(the nodes of all columns [T, blocks, 2], the numbers of those above -inf [T, blocks])."""
    t = logits.shape[0]
    nodes = empty((t, blocks.count, 2), torch.float32, logits.device)
    counts = empty((t, blocks.count), torch.int32, logits.device)
    _launch_blocks(cache, cuts, logits, temperature, blocks, nodes, counts, raw, bounds, False)
    return nodes, counts


def _launch_blocks(
    cache: ShapeCache, cuts: Cuts, logits: Tensor, temperature: Tensor, blocks: Blocks,
    nodes: Tensor, counts: Tensor, raw: Tensor | None, bounds: bool, cut: bool,
) -> None:  # fmt: skip
    launch(
        cache, _blocks_kernel, (logits.shape[0], blocks.count, 1),
        (logits, temperature, nodes, raw, counts, cuts.tops, cuts.bottoms, cuts.logits,
         cuts.columns, logits.stride(0), logits.shape[1], blocks.count, blocks.columns,
         blocks.leaves, blocks.levels, raw is not None, bounds, cut, blocks.overlaps),
        {"num_warps": TREE_WARPS, "launch_pdl": blocks.overlaps}, (cut,),
    )  # fmt: skip


def new_results(t: int, raw: bool, device: torch.device) -> tuple[Tensor, ...]:
    """Memory for the fields of `Sampled`, in its order."""
    ids, kept = empty((t,), torch.int64, device), empty((t,), torch.int32, device)
    logprobs, mass = empty((t,), torch.float32, device), empty((t,), torch.float32, device)
    return ids, logprobs, kept, mass, empty((t if raw else 0,), torch.float32, device)


def sample(
    logits: Tensor, keys: Tensor, positions: Tensor, temperature: Tensor, top_k: Tensor | None,
    top_p: Tensor | None, min_p: Tensor | None, raw: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(ids, logprobs, kept, mass, raw logprobs) of logits[T, V] with dense rows."""
    (t, v), device = logits.shape, logits.device
    results = new_results(t, raw, device)
    if not t:
        return results
    blocks, limits = blocks_of(v, device), (top_k, top_p, min_p)
    truncated = any(x is not None for x in limits)
    cache = _cache("sample", logits, *limits, raw)
    raw_nodes = empty((t, blocks.count, 2), torch.float32, device) if raw else None
    cuts = Cuts(t, blocks, device, truncated)
    nodes, counts = _first_pass(cache, cuts, logits, temperature, blocks, raw_nodes, truncated)
    if truncated:
        find_cuts(cache, cuts, logits, nodes, temperature, *limits, blocks)
        _launch_blocks(cache, cuts, logits, temperature, blocks, nodes, counts, None, False, True)
    launch(
        cache, _finish_kernel, (t, 1, 1),
        (logits, temperature, keys, positions, nodes, raw_nodes, counts, cuts.tops, cuts.logits,
         cuts.columns, cuts.roots, *results, logits.stride(0), v, blocks.count, blocks.columns,
         blocks.leaves, blocks.levels, blocks.row_levels, raw, truncated, blocks.overlaps),
        {"num_warps": WARPS, "launch_pdl": blocks.overlaps},
    )  # fmt: skip
    return results


def kept_tokens(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None,
    min_p: Tensor | None,
) -> Tensor:  # fmt: skip
    """bool [T, V]."""
    (t, v), device = logits.shape, logits.device
    out = empty((t, v), torch.bool, device)
    if not t:
        return out
    greedy = temperature == 0
    # The largest logit is the first of the order at any temperature.
    top_k = torch.where(
        greedy, 1, torch.zeros_like(greedy, dtype=torch.int32) if top_k is None else top_k
    )
    top_k, temperature = top_k.int(), torch.where(greedy, 1.0, temperature)
    blocks, limits = blocks_of(v, device), (top_k, top_p, min_p)
    cache = _cache("kept_tokens", logits, *limits)
    cuts = Cuts(t, blocks, device, True)
    nodes, _ = _first_pass(cache, cuts, logits, temperature, blocks, None, True)
    find_cuts(cache, cuts, logits, nodes, temperature, *limits, blocks)
    launch(
        cache, _mask_kernel, (t, blocks.count, 1),
        (logits, cuts.logits, cuts.columns, cuts.roots, out, logits.stride(0), v, blocks.columns,
         blocks.overlaps),
        {"num_warps": WARPS, "launch_pdl": blocks.overlaps},
    )  # fmt: skip
    return out
