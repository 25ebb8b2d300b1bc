# ruff: noqa: SIM108 (a ternary of two shapes is no Triton)
"""The Triton kernels of `route`: a program takes ROWS rows of all experts."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.device import facts
from rlk_kernels.launching import cdiv, launch, power_of_2, shape_cache
from rlk_kernels.memory import empty
from rlk_kernels.numerics.lse_tree.kernels import leaf_stats, merge_neighbours, scaled
from rlk_kernels.numerics.lse_tree.tree import LEAF, levels

WARP_COLUMNS, MOST_WARPS = 256, 8
"""Forward: experts that a warp takes of a program's one row, and warps."""
ELEMENTS, WARPS = 512, 4
"""Backward: elements of a program's block of rows, and warps."""
LARGEST = tl.constexpr(0x7FFFFFFF)
TAKEN = tl.constexpr(-0x80000000)


@triton.jit
def sort_key(z):
    """int32 that orders as z does: -0 as +0, and NaN above all."""
    bits = (z + 0.0).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(z != z, LARGEST, key)


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
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BE)
    there = (rows[:, None] < T) & (cols[None, :] < E)
    at = rows.to(tl.int64)[:, None]
    z = tl.load(z_ptr + at * E + cols[None, :], mask=there, other=float("-inf"))
    key = tl.where(cols[None, :] < E, sort_key(z), TAKEN)
    picked = cols[None, :] < tl.zeros((ROWS, 1), tl.int32)
    for _ in range(K):
        best = tl.max(key, 1)
        expert = tl.min(tl.where(key == best[:, None], cols[None, :], BE), 1)
        now = cols[None, :] == expert[:, None]
        picked = picked | now
        key = tl.where(now, TAKEN, key)
    if NORMALIZE:
        # of numbers that are none, the difference to themselves is none
        nothing = tl.max(tl.where(picked & (z != z), 1, 0), 1) > 0
        top = tl.max(tl.where(picked, z, float("-inf")), 1)
        top = tl.where(nothing, float("nan"), top)
        terms = tl.exp(z - top[:, None])
        total = tl.zeros((ROWS,), tl.float32)
        left = picked
        for _ in range(K):
            expert = tl.min(tl.where(left, cols[None, :], BE), 1)
            now = cols[None, :] == expert[:, None]
            total += tl.sum(tl.where(now, terms, 0.0), 1)
            left = left & (cols[None, :] != expert[:, None])
        w = terms / total[:, None]
    else:
        w = _softmax(z, ROWS, BE, LEAVES, LEVELS)
    place = tl.cumsum(picked.to(tl.int32), 1) - 1
    where = at * K + place
    tl.store(w_ptr + where, w, mask=picked & there)
    tl.store(ids_ptr + where, cols[None, :] + tl.zeros((ROWS, 1), tl.int32), mask=picked & there)


@triton.jit(do_not_specialize=["T"])
def _route_bwd_kernel(
    z_ptr, w_ptr, ids_ptr, g_ptr, dz_ptr, T, E, K: tl.constexpr, NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr, BE: tl.constexpr, LEAVES: tl.constexpr, LEVELS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
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


def rows_and_warps(block: int, backward: bool) -> tuple[int, int]:
    """Of a program, for rows of so many columns, a power of two."""
    if backward:
        return max(1, ELEMENTS // block), WARPS
    return 1, min(MOST_WARPS, max(1, block // WARP_COLUMNS))


def _launch(kernel, logits: Tensor, tensors: tuple[Tensor, ...], k: int, normalize: bool) -> None:
    t, experts = logits.shape
    if not t:
        return
    block = max(power_of_2(experts), LEAF)
    rows, warps = rows_and_warps(block, kernel is _route_bwd_kernel)
    leaves, overlap = block // LEAF, facts(logits.device).overlaps
    cache = shape_cache("route", kernel.__name__, experts, k, normalize, logits.device)
    launch(
        cache, kernel, (cdiv(t, rows), 1, 1),
        (logits, *tensors, t, experts, k, normalize, rows, block, leaves, levels(leaves), overlap),
        {"num_warps": warps, "launch_pdl": overlap},
    )  # fmt: skip


def forward(logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """(weights[T, k], ids int32 [T, k])."""
    shape = (logits.shape[0], k)
    weights = empty(shape, torch.float32, logits.device)
    ids = empty(shape, torch.int32, logits.device)
    _launch(_route_fwd_kernel, logits, (weights, ids), k, normalize)
    return weights, ids


def backward(logits: Tensor, weights: Tensor, ids: Tensor, grad: Tensor, normalize: bool) -> Tensor:
    """dlogits[T, E]."""
    out = torch.empty_like(logits)
    _launch(_route_bwd_kernel, logits, (weights, ids, grad, out), ids.shape[1], normalize)
    return out
