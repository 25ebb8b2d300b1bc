# ruff: noqa: SIM108 (a ternary of two shapes is no Triton)
"""The Triton kernels of `route` and `route_corrected`: a program has ROWS rows of all experts."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.device import facts
from rlk_kernels.launching import cdiv, launch, power_of_2, shape_cache
from rlk_kernels.memory import empty
from rlk_kernels.numerics.lse_tree.kernels import leaf_stats, merge_neighbours, scaled
from rlk_kernels.numerics.lse_tree.tree import LEAF, levels
from rlk_kernels.ops.overlap import begin_overlapped

WARP_COLUMNS, MOST_WARPS = 256, 8
"""Forward: experts of a warp in a program's single row, and the most warps."""
ELEMENTS, WARPS = 512, 4
"""Backward: elements of a program's block of rows, and warps."""
LARGEST = tl.constexpr(0x7FFFFFFF)
TAKEN = tl.constexpr(-0x80000000)


@triton.jit
def sort_key(z):
    """An int32 with the order of z, where -0 equals +0 and NaN is the largest."""
    bits = (z + 0.0).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(z != z, LARGEST, key)


@triton.jit
def _first_largest(key, cols, BE: tl.constexpr):
    """The column of each row's largest key[ROWS, BE], the lowest one for ties."""
    return tl.min(tl.where(key == tl.max(key, 1)[:, None], cols[None, :], BE), 1)


@triton.jit
def _pick_largest(key, cols, K: tl.constexpr, ROWS: tl.constexpr, BE: tl.constexpr):
    """Whether each column has one of the K largest keys of its row, [ROWS, BE]."""
    picked = cols[None, :] < tl.zeros((ROWS, 1), tl.int32)
    for _ in range(K):
        now = cols[None, :] == _first_largest(key, cols, BE)[:, None]
        picked = picked | now
        key = tl.where(now, TAKEN, key)
    return picked


@triton.jit
def _sum_picked(x, picked, cols, K: tl.constexpr, ROWS: tl.constexpr, BE: tl.constexpr):
    """The sum of the picked x[ROWS, BE] of each row, one by one in ascending column."""
    total = tl.zeros((ROWS,), tl.float32)
    for _ in range(K):
        expert = tl.min(tl.where(picked, cols[None, :], BE), 1)
        now = cols[None, :] == expert[:, None]
        total += tl.sum(tl.where(now, x, 0.0), 1)
        picked = picked & (cols[None, :] != expert[:, None])
    return total


@triton.jit
def _store_picked(
    w_ptr, ids_ptr, w, picked, there, at, cols, K: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Store the weights and ids of the picked columns side by side, in ascending column."""
    slot = at * K + (tl.cumsum(picked.to(tl.int32), 1) - 1)
    tl.store(w_ptr + slot, w, mask=picked & there)
    tl.store(ids_ptr + slot, cols[None, :] + tl.zeros((ROWS, 1), tl.int32), mask=picked & there)


@triton.jit
def _softmax(z, ROWS: tl.constexpr, BE: tl.constexpr, LEAVES: tl.constexpr, LEVELS: tl.constexpr):
    """Softmax over all columns of z[ROWS, BE], by the tree."""
    n, s, u, _ = leaf_stats(z, ROWS, LEAVES, False)
    n, s, u = merge_neighbours(n, s, u, ROWS, LEAVES, LEVELS, False)
    return tl.exp2(scaled(z, tl.reshape(n, (ROWS, 1)))) / tl.reshape(s, (ROWS, 1))


@triton.jit(do_not_specialize=["T"])
def _route_fwd_kernel(
    z_ptr, w_ptr, ids_ptr, T, E, K: tl.constexpr, NORMALIZE: tl.constexpr, ROWS: tl.constexpr,
    BE: tl.constexpr, LEAVES: tl.constexpr, LEVELS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin_overlapped(OVERLAP)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BE)
    there = (rows[:, None] < T) & (cols[None, :] < E)
    at = rows.to(tl.int64)[:, None]
    z = tl.load(z_ptr + at * E + cols[None, :], mask=there, other=float("-inf"))
    key = tl.where(cols[None, :] < E, sort_key(z), TAKEN)
    picked = _pick_largest(key, cols, K, ROWS, BE)
    if NORMALIZE:
        # the difference of a NaN or an infinity to itself is a NaN
        has_nan = tl.max(tl.where(picked & (z != z), 1, 0), 1) > 0
        top = tl.max(tl.where(picked, z, float("-inf")), 1)
        top = tl.where(has_nan, float("nan"), top)
        terms = tl.exp(z - top[:, None])
        w = terms / _sum_picked(terms, picked, cols, K, ROWS, BE)[:, None]
    else:
        w = _softmax(z, ROWS, BE, LEAVES, LEVELS)
    _store_picked(w_ptr, ids_ptr, w, picked, there, at, cols, K, ROWS)


@triton.jit(do_not_specialize=["T"])
def _route_bwd_kernel(
    z_ptr, w_ptr, ids_ptr, g_ptr, dz_ptr, T, E, K: tl.constexpr, NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr, BE: tl.constexpr, LEAVES: tl.constexpr, LEVELS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    begin_overlapped(OVERLAP)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BE)
    at = rows.to(tl.int64)
    here = rows < T
    mean = tl.zeros((ROWS,), tl.float32)
    for j in range(K):
        w = tl.load(w_ptr + at * K + j, mask=here, other=0.0)
        mean += w * tl.load(g_ptr + at * K + j, mask=here, other=0.0)
    there = here[:, None] & (cols[None, :] < E)
    dz = tl.zeros((ROWS, BE), tl.float32)
    for j in range(K):
        w = tl.load(w_ptr + at * K + j, mask=here, other=0.0)
        g = tl.load(g_ptr + at * K + j, mask=here, other=0.0)
        expert = tl.load(ids_ptr + at * K + j, mask=here, other=0)
        if NORMALIZE:
            term = w * (g - mean)
        else:
            term = g
        dz = tl.where(cols[None, :] == expert[:, None], term[:, None], dz)
    if not NORMALIZE:
        z = tl.load(z_ptr + at[:, None] * E + cols[None, :], mask=there, other=float("-inf"))
        dz = _softmax(z, ROWS, BE, LEAVES, LEVELS) * (dz - mean[:, None])
    tl.store(dz_ptr + at[:, None] * E + cols[None, :], dz, mask=there)


@triton.jit
def _group_score(c, key, cols, BE: tl.constexpr):
    """The sum of the two c with the largest keys of each row."""
    first = _first_largest(key, cols, BE)
    is_first = cols[None, :] == first[:, None]
    second = _first_largest(tl.where(is_first, TAKEN, key), cols, BE)
    is_second = cols[None, :] == second[:, None]
    return tl.sum(tl.where(is_first, c, 0.0), 1) + tl.sum(tl.where(is_second, c, 0.0), 1)


@triton.jit
def _chosen_groups(
    c, key, cols, E, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, ROWS: tl.constexpr,
    BE: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """Whether each expert is in a chosen group, [ROWS, BE]."""
    size = E // GROUPS
    group = cols // size
    groups = tl.arange(0, BG)
    group_key = tl.full((ROWS, BG), TAKEN, tl.int32)
    for g in range(GROUPS):
        here = tl.where(group[None, :] == g, key, TAKEN)
        score = sort_key(_group_score(c, here, cols, BE))
        group_key = tl.where(groups[None, :] == g, score[:, None], group_key)
    inside = cols[None, :] < tl.zeros((ROWS, 1), tl.int32)
    for _ in range(TOP_GROUPS):
        best = _first_largest(group_key, groups, BG)
        inside = inside | (group[None, :] == best[:, None])
        group_key = tl.where(groups[None, :] == best[:, None], TAKEN, group_key)
    return inside


@triton.jit(do_not_specialize=["T"])
def _route_corrected_fwd_kernel(
    z_ptr, correction_ptr, w_ptr, ids_ptr, T, E, scale, K: tl.constexpr, NORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BG: tl.constexpr, ROWS: tl.constexpr,
    BE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin_overlapped(OVERLAP)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BE)
    there = (rows[:, None] < T) & (cols[None, :] < E)
    at = rows.to(tl.int64)[:, None]
    z = tl.load(z_ptr + at * E + cols[None, :], mask=there, other=0.0)
    s = 1.0 / (1.0 + tl.exp(-z))
    c = s + tl.load(correction_ptr + cols, mask=cols < E, other=0.0)[None, :]
    key = tl.where(cols[None, :] < E, sort_key(c), TAKEN)
    if TOP_GROUPS < GROUPS:
        inside = _chosen_groups(c, key, cols, E, GROUPS, TOP_GROUPS, ROWS, BE, BG)
        key = tl.where(inside, key, TAKEN)
    picked = _pick_largest(key, cols, K, ROWS, BE)
    w = s
    if NORMALIZE:
        w = s / (_sum_picked(s, picked, cols, K, ROWS, BE) + 1e-20)[:, None]
    _store_picked(w_ptr, ids_ptr, w * scale, picked, there, at, cols, K, ROWS)


@triton.jit(do_not_specialize=["T"])
def _route_corrected_bwd_kernel(
    z_ptr, ids_ptr, g_ptr, dz_ptr, T, E, scale, K: tl.constexpr, NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr, BE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin_overlapped(OVERLAP)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BE)
    at = rows.to(tl.int64)
    here = rows < T
    total = tl.zeros((ROWS,), tl.float32)
    mean = tl.zeros((ROWS,), tl.float32)
    for j in range(K):
        expert = tl.load(ids_ptr + at * K + j, mask=here, other=0)
        s = 1.0 / (1.0 + tl.exp(-tl.load(z_ptr + at * E + expert, mask=here, other=0.0)))
        total += s
        mean += s * tl.load(g_ptr + at * K + j, mask=here, other=0.0)
    total = total + 1e-20
    mean = mean / total
    dz = tl.zeros((ROWS, BE), tl.float32)
    for j in range(K):
        expert = tl.load(ids_ptr + at * K + j, mask=here, other=0)
        s = 1.0 / (1.0 + tl.exp(-tl.load(z_ptr + at * E + expert, mask=here, other=0.0)))
        g = tl.load(g_ptr + at * K + j, mask=here, other=0.0)
        if NORMALIZE:
            g = (g - mean) / total
        term = scale * s * (1.0 - s) * g
        dz = tl.where(cols[None, :] == expert[:, None], term[:, None], dz)
    there = here[:, None] & (cols[None, :] < E)
    tl.store(dz_ptr + at[:, None] * E + cols[None, :], dz, mask=there)


def _program(block: int, backward: bool) -> tuple[int, int]:
    """(rows, warps) of a program for rows of `block` columns, a power of two."""
    if backward:
        return max(1, ELEMENTS // block), WARPS
    return 1, min(MOST_WARPS, max(1, block // WARP_COLUMNS))


def _launch(
    kernel, logits: Tensor, tensors: tuple[Tensor, ...], numbers: tuple[float, ...], how: tuple,
    block: int, tree: tuple[int, ...] = (),
) -> None:  # fmt: skip
    """Launch a kernel. how: its constants without the block; tree: the leaves and levels of it."""
    t, experts = logits.shape
    if not t:
        return
    rows, warps = _program(block, kernel in (_route_bwd_kernel, _route_corrected_bwd_kernel))
    overlap = facts(logits.device).overlaps
    cache = shape_cache("route", kernel.__name__, experts, *how, logits.device)
    launch(
        cache, kernel, (cdiv(t, rows), 1, 1),
        (logits, *tensors, t, experts, *numbers, *how, rows, block, *tree, overlap),
        {"num_warps": warps, "launch_pdl": overlap},
    )  # fmt: skip


def _launch_by_tree(kernel, logits: Tensor, tensors: tuple[Tensor, ...], *how) -> None:
    block = max(power_of_2(logits.shape[1]), LEAF)
    leaves = block // LEAF
    _launch(kernel, logits, tensors, (), how, block, (leaves, levels(leaves)))


def _results(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Memory for weights[T, k] and ids int32 [T, k]."""
    shape, device = (logits.shape[0], k), logits.device
    return empty(shape, torch.float32, device), empty(shape, torch.int32, device)


def forward(logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """(weights[T, k], ids int32 [T, k])."""
    results = _results(logits, k)
    _launch_by_tree(_route_fwd_kernel, logits, results, k, normalize)
    return results


def backward(logits: Tensor, weights: Tensor, ids: Tensor, grad: Tensor, normalize: bool) -> Tensor:
    """dlogits[T, E]."""
    out = torch.empty_like(logits)
    tensors = (weights, ids, grad, out)
    _launch_by_tree(_route_bwd_kernel, logits, tensors, ids.shape[1], normalize)
    return out


def forward_corrected(
    logits: Tensor, correction: Tensor, k: int, normalize: bool, groups: int, top_groups: int,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(weights[T, k], ids int32 [T, k])."""
    results, block = _results(logits, k), power_of_2(logits.shape[1])
    how = (k, normalize, groups, top_groups, power_of_2(groups))
    _launch(_route_corrected_fwd_kernel, logits, (correction, *results), (scale,), how, block)
    return results


def backward_corrected(
    logits: Tensor, ids: Tensor, grad: Tensor, normalize: bool, scale: float
) -> Tensor:
    """dlogits[T, E]."""
    out, block = torch.empty_like(logits), power_of_2(logits.shape[1])
    how = (ids.shape[1], normalize)
    _launch(_route_corrected_bwd_kernel, logits, (ids, grad, out), (scale,), how, block)
    return out
