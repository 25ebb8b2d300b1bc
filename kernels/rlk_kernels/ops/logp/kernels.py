"""The Triton kernels of `logp`: a program takes a block of columns, a whole subtree."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.launching import launch, launches

from rlk_kernels.device import facts, interpreting
from rlk_kernels.numerics.lse_tree.kernels import (
    LN2,
    NO_COLUMNS,
    leaf_stats_of_halves,
    merge_neighbours,
    scaled,
)
from rlk_kernels.numerics.lse_tree.tree import LEAF, levels
from rlk_kernels.ops.logp.portable import inverse_of

COLUMNS, WARPS = 4096, 1
"""Columns of a program, and its warps: they change no bit."""


def block_columns() -> int:
    """Columns of one program: a power of two, so a whole subtree; changes no bit."""
    return 256 if interpreting() else COLUMNS


@triton.jit
def _logp_blocks_kernel(
    x_ptr, stats_ptr, stride_t, V, nodes, inverse,
    BLOCK: tl.constexpr, LEAVES: tl.constexpr, LEVELS: tl.constexpr, SCALED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """(n, s) of every block of columns."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    # a thread's load is half a leaf: in two loads it gets whole ones, and shares none
    cols = block * BLOCK + tl.arange(0, LEAVES)[:, None] * 16 + tl.arange(0, 8)[None, :]
    at = x_ptr + row * stride_t + cols
    left = tl.load(at, mask=cols < V, other=float("-inf")).to(tl.float32)
    right = tl.load(at + 8, mask=cols + 8 < V, other=float("-inf")).to(tl.float32)
    if SCALED:
        left = left * inverse
        right = right * inverse
    n, s = leaf_stats_of_halves(left, right, LEAVES)
    n, s, _ = merge_neighbours(n, s, s, 1, LEAVES, LEVELS, False)
    at = stats_ptr + (row * nodes + block) * 2 + tl.zeros((1, 1), tl.int32)
    tl.store(at, n)
    tl.store(at + 1, s)


@triton.jit
def _logp_row_kernel(
    x_ptr, target_ptr, stats_ptr, logp_ptr, n_ptr, logs_ptr, stride_t, V, nodes, inverse,
    LEVELS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, 1 << LEVELS)[None, :]
    at = stats_ptr + (row * nodes + node) * 2
    n = tl.load(at, mask=node < nodes, other=NO_COLUMNS)
    s = tl.load(at + 1, mask=node < nodes, other=0.0)
    n, s, _ = merge_neighbours(n, s, s, 1, 1 << LEVELS, LEVELS, False)
    n = tl.reshape(n, (1,))
    log_s = tl.log2(tl.reshape(s, (1,)))
    target = tl.load(target_ptr + row).to(tl.int64)
    inside = (target >= 0) & (target < V)
    x = tl.load(x_ptr + row * stride_t + target, mask=inside, other=float("nan"))
    logp = (scaled(x.to(tl.float32) * inverse, n) - log_s) * LN2
    here = row + tl.zeros((1,), tl.int64)
    tl.store(logp_ptr + here, tl.where(target < 0, 0.0, logp))
    tl.store(n_ptr + here, n)
    tl.store(logs_ptr + here, log_s)


@triton.jit
def _logp_bwd_kernel(
    x_ptr, target_ptr, n_ptr, logs_ptr, g_ptr, dx_ptr, stride_t, V, inverse,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(target_ptr + row)
    x = tl.load(x_ptr + row * stride_t + cols, mask=cols < V, other=float("-inf"))
    z = x.to(tl.float32) * inverse
    p = tl.exp2(scaled(z, tl.load(n_ptr + row)) - tl.load(logs_ptr + row))
    g = tl.load(g_ptr + row) * inverse
    dx = g * (tl.where(cols == target, 1.0, 0.0) - p)
    dx = tl.where(dx == dx, dx, tl.where(g == 0.0, 0.0, float("nan")))
    dx = tl.where(target < 0, 0.0, dx)
    tl.store(dx_ptr + row * V + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < V)


def forward(logits: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """(logp, n, log2 s)[T] of logits[T, V], whose rows are dense."""
    t, v = logits.shape
    inverse = inverse_of(temperature, torch.float32)
    logp, m, log_s = (torch.empty(t, dtype=torch.float32, device=logits.device) for _ in range(3))
    block = block_columns()
    nodes = triton.cdiv(v, block)
    overlap = facts(logits.device).overlaps
    stats = torch.empty(t, nodes, 2, dtype=torch.float32, device=logits.device)
    if t:
        seen = launches(logits.shape, logits.stride(0), logits.dtype, target.dtype, inverse != 1.0)
        launch(
            seen, _logp_blocks_kernel, (t, nodes, 1), logits, stats, logits.stride(0), v, nodes, inverse, block, block // LEAF,
            levels(block // LEAF), inverse != 1.0, overlap, num_warps=WARPS, launch_pdl=overlap,
        )  # fmt: skip
        launch(
            seen, _logp_row_kernel, (t, 1, 1), logits, target, stats, logp, m, log_s, logits.stride(0), v, nodes, inverse,
            levels(nodes), overlap, num_warps=1, launch_pdl=overlap,
        )  # fmt: skip
    return logp, m, log_s


def backward(
    logits: Tensor, target: Tensor, m: Tensor, log_s: Tensor, g: Tensor, temperature: float
) -> Tensor:
    """dlogits[T, V]."""
    t, v = logits.shape
    inverse = inverse_of(temperature, torch.float32)
    dx = torch.empty(t, v, dtype=logits.dtype, device=logits.device)
    if t:
        block = block_columns()
        _logp_bwd_kernel[(t, triton.cdiv(v, block))](
            logits, target, m, log_s, g, dx, logits.stride(0), v, inverse, block, num_warps=4
        )
    return dx
