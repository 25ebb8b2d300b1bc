"""The Triton kernels of `logp`: a program has a block of columns, which is a whole subtree."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.device import DeviceFacts, facts
from rlk_kernels.launching import cdiv, launch, power_of_2, shape_cache
from rlk_kernels.matmul.epilogue import final_logits, softcap_slope
from rlk_kernels.memory import empty
from rlk_kernels.numerics.lse_tree.kernels import (
    LN2,
    NO_COLUMNS,
    leaf_stats_of_halves,
    merge_neighbours,
    scaled,
)
from rlk_kernels.numerics.lse_tree.tree import LEAF, levels
from rlk_kernels.ops.linear_logp.options import LogitOptions, options_of
from rlk_kernels.ops.overlap import begin_overlapped

COLUMNS, WARPS, RANKED = 4096, 1, 1024
"""Columns of a program, its warps, and its columns with top_k; they change no bit."""
FP32 = tl.constexpr(tl.float32)
LAST = tl.constexpr(-(1 << 63))
"""A rank below all other ranks."""


def block_columns(interpreted: bool) -> int:
    """Columns of one program, a power of two and so a whole subtree; they change no bit."""
    return 256 if interpreted else COLUMNS


@triton.jit
def _rank(x, column):
    """An int64 that is larger for a larger x, and among equal x for the lower column."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # + 0.0: -0 is 0
    bits = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)


@triton.jit
def _logp_blocks_kernel(
    x_ptr, stats_ptr, ranks_ptr, stride_t, V, nodes, cap, inverse_cap, scale, inverse,
    BLOCK: tl.constexpr, LEAVES: tl.constexpr, LEVELS: tl.constexpr, SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr, TOP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """(n, s) of each block of columns, and the ranks of its TOP largest logits."""
    begin_overlapped(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    # a load of a thread has half a leaf; with two loads a thread has whole leaves
    cols = block * BLOCK + tl.arange(0, LEAVES)[:, None] * 16 + tl.arange(0, 8)[None, :]
    at = x_ptr + row * stride_t + cols
    left = tl.load(at, mask=cols < V, other=float("-inf")).to(tl.float32)
    right = tl.load(at + 8, mask=cols + 8 < V, other=float("-inf")).to(tl.float32)
    if TOP > 0:
        of_left = _rank(left, cols)
        of_right = _rank(right, cols + 8)
        for i in range(TOP):
            best = tl.max(tl.max(tl.maximum(of_left, of_right), 1), 0)
            tl.store(ranks_ptr + (row * nodes + block) * TOP + i, best)
            of_left = tl.where(of_left == best, LAST, of_left)
            of_right = tl.where(of_right == best, LAST, of_right)
    left = final_logits(left, 0, cap, inverse_cap, scale, inverse, False, FP32, SOFTCAP, SCALED)
    right = final_logits(right, 0, cap, inverse_cap, scale, inverse, False, FP32, SOFTCAP, SCALED)
    if SOFTCAP:  # columns after the last keep a weight of 0
        left = tl.where(cols < V, left, float("-inf"))
        right = tl.where(cols + 8 < V, right, float("-inf"))
    n, s = leaf_stats_of_halves(left, right, LEAVES)
    n, s, _ = merge_neighbours(n, s, s, 1, LEAVES, LEVELS, False)
    at = stats_ptr + (row * nodes + block) * 2 + tl.zeros((1, 1), tl.int32)
    tl.store(at, n)
    tl.store(at + 1, s)


@triton.jit
def _store_logp(
    at, x_ptr, ids, mask, V, n, log_s, cap, inverse_cap, scale, inverse, SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Store the log-probability of each id of a row: 0 for a negative id, NaN for V or more."""
    x = tl.load(x_ptr + ids, mask=mask & (ids >= 0) & (ids < V), other=float("nan"))
    x = x.to(tl.float32)
    z = final_logits(x, 0, cap, inverse_cap, scale, inverse, False, FP32, SOFTCAP, SCALED)
    logp = (scaled(z, n) - log_s) * LN2
    tl.store(at, tl.where(ids < 0, 0.0, logp), mask=mask)


@triton.jit
def _logp_row_kernel(
    x_ptr, target_ptr, stats_ptr, logp_ptr, root_ptr, ids_ptr, id_logp_ptr, ranks_ptr, top_ptr,
    top_ids_ptr, stride_t, V, nodes, cap, inverse_cap, scale, inverse, J, LEVELS: tl.constexpr,
    JP: tl.constexpr, TOP: tl.constexpr, TOPP: tl.constexpr, RANKS: tl.constexpr,
    SOFTCAP: tl.constexpr, SCALED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """JP: J token_ids, padded. TOP: the number of largest ones of RANKS (padded) ranks; TOPP: TOP,
    padded."""
    begin_overlapped(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, 1 << LEVELS)[None, :]
    at = stats_ptr + (row * nodes + node) * 2
    n = tl.load(at, mask=node < nodes, other=NO_COLUMNS)
    s = tl.load(at + 1, mask=node < nodes, other=0.0)
    n, s, _ = merge_neighbours(n, s, s, 1, 1 << LEVELS, LEVELS, False)
    n = tl.reshape(n, (1,))
    log_s = tl.log2(tl.reshape(s, (1,)))
    here = row + tl.zeros((1,), tl.int64)
    target = tl.load(target_ptr + here).to(tl.int64)
    _store_logp(
        logp_ptr + here, x_ptr + row * stride_t, target, here >= 0, V, n, log_s, cap, inverse_cap,
        scale, inverse, SOFTCAP, SCALED,
    )  # fmt: skip
    tl.store(root_ptr + here * 2, n)
    tl.store(root_ptr + here * 2 + 1, log_s)
    if JP > 0:
        i = tl.arange(0, JP)
        ids = tl.load(ids_ptr + row * J + i, mask=i < J, other=0).to(tl.int64)
        _store_logp(
            id_logp_ptr + row * J + i, x_ptr + row * stride_t, ids, i < J, V, n, log_s, cap,
            inverse_cap, scale, inverse, SOFTCAP, SCALED,
        )  # fmt: skip
    if TOP > 0:
        i = tl.arange(0, RANKS)
        ranks = tl.load(ranks_ptr + row * nodes * TOP + i, mask=i < nodes * TOP, other=LAST)
        i = tl.arange(0, TOPP)
        top = tl.full((TOPP,), 0, tl.int64)
        for k in range(TOP):
            best = tl.max(ranks, 0)
            top = tl.where(i == k, best, top)
            ranks = tl.where(ranks == best, LAST, ranks)
        ids = 0x7FFFFFFF - (top & 0xFFFFFFFF)
        tl.store(top_ids_ptr + row * TOP + i, ids, mask=i < TOP)
        _store_logp(
            top_ptr + row * TOP + i, x_ptr + row * stride_t, ids, i < TOP, V, n, log_s, cap,
            inverse_cap, scale, inverse, SOFTCAP, SCALED,
        )  # fmt: skip


@triton.jit
def _logp_bwd_kernel(
    x_ptr, target_ptr, root_ptr, g_ptr, dx_ptr, stride_t, V, cap, inverse_cap, scale,
    inverse, slope, inverse_top, BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(target_ptr + row)
    x = tl.load(x_ptr + row * stride_t + cols, mask=cols < V, other=float("-inf"))
    x = x.to(tl.float32)
    z = final_logits(x, 0, cap, inverse_cap, scale, inverse, False, FP32, SOFTCAP, SCALED)
    p = tl.exp2(scaled(z, tl.load(root_ptr + row * 2)) - tl.load(root_ptr + row * 2 + 1))
    g = tl.load(g_ptr + row) * slope
    dx = g * (tl.where(cols == target, 1.0, 0.0) - p)
    if SOFTCAP:
        dx = dx * softcap_slope(z, inverse_top)
    dx = tl.where(dx == dx, dx, tl.where(g == 0.0, 0.0, float("nan")))
    dx = tl.where(target < 0, 0.0, dx)
    tl.store(dx_ptr + row * V + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < V)


@triton.jit
def _of_root_kernel(z_ptr, target_ptr, root_ptr, logp_ptr, out_ptr, T, BLOCK: tl.constexpr):
    """logp and (n, log2 s) from the logits z of the targets and (n, s) of the rows."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < T
    z = tl.load(z_ptr + row, mask=mask).to(tl.float32)
    n = tl.load(root_ptr + row * 2, mask=mask)
    log_s = tl.log2(tl.load(root_ptr + row * 2 + 1, mask=mask, other=1.0))
    logp = (scaled(z, n) - log_s) * LN2
    target = tl.load(target_ptr + row, mask=mask)
    tl.store(logp_ptr + row, tl.where(target < 0, 0.0, logp), mask=mask)
    tl.store(out_ptr + row * 2, n, mask=mask)
    tl.store(out_ptr + row * 2 + 1, log_s, mask=mask)


def nodes(logits: Tensor) -> Tensor:
    """(n, s)[T, N, 2] of the N blocks of logits[T, V], whose columns are one subtree."""
    (t, v), spec = logits.shape, options_of(torch.float32, 0.0, 1.0, 1.0)
    here = facts(logits.device)
    block = min(block_columns(here.interpreted), power_of_2(v))
    out = empty((t, cdiv(v, block), 2), torch.float32, logits.device)
    if t:
        _logp_blocks_kernel[(t, out.shape[1])](
            logits, out, None, logits.stride(0), v, out.shape[1], *spec.numbers, block,
            block // LEAF, levels(block // LEAF), False, False, 0, False, num_warps=WARPS,
        )  # fmt: skip
    return out


def logp_of_root(z: Tensor, target: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """logp[T] and (n, log2 s)[T, 2] from the targets' logits z[T] and (n, s)[T, 2]."""
    logp, out = empty(z.shape, torch.float32, z.device), torch.empty_like(root)
    if len(z):
        _of_root_kernel[(cdiv(len(z), 256),)](z, target, root.contiguous(), logp, out, len(z), 256)
    return logp, out


def forward(
    logits: Tensor, target: Tensor, token_ids: Tensor | None, top_k: int, spec: LogitOptions
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(logp[T], (n, log2 s)[T, 2], logp of token_ids[T, J], logp of the top_k, their ids) of
    logits[T, V] with dense rows; the last three are None if they are not requested."""
    (t, v), device = logits.shape, logits.device
    logp, root = empty((t,), torch.float32, device), empty((t, 2), torch.float32, device)
    j = 0 if token_ids is None else token_ids.shape[1]
    id_logp = top = top_ids = ranks = None
    if token_ids is not None:
        id_logp = empty((t, j), torch.float32, device)
    cache = shape_cache(
        "logp", logits.shape, logits.stride(0), logits.dtype, target.dtype, spec.softcap > 0,
        spec.scaled, j, token_ids is None or token_ids.dtype, top_k, device,
    )  # fmt: skip
    nodes, of_blocks, of_rows, block_options, row_options = cache.get_or_create(
        "constants", None, _constants, v, j, top_k, spec, facts(device)
    )
    stats = empty((t, nodes, 2), torch.float32, device)
    if top_k:
        top = torch.empty(t, top_k, dtype=torch.float32, device=device)
        top_ids = torch.empty(t, top_k, dtype=torch.int64, device=device)
        ranks = torch.empty(t, nodes, top_k, dtype=torch.int64, device=device)
    if t:
        sizes = logits.stride(0), v, nodes, *spec.numbers
        blocks = (logits, stats, ranks, *sizes, *of_blocks)
        launch(cache, _logp_blocks_kernel, (t, nodes, 1), blocks, block_options)
        launch(
            cache, _logp_row_kernel, (t, 1, 1),
            (logits, target, stats, logp, root, token_ids, id_logp, ranks, top, top_ids, *sizes,
             *of_rows),
            row_options,
        )  # fmt: skip
    return logp, root, id_logp, top, top_ids


def _constants(
    v: int, j: int, top_k: int, spec: LogitOptions, here: DeviceFacts
) -> tuple[int, tuple, tuple, dict, dict]:
    """What calls of one shape share: the programs of a row, the constants of both kernels, their
    options."""
    block = block_columns(here.interpreted)
    block = block if top_k == 0 else min(block, RANKED)
    nodes = cdiv(v, block)
    capped, overlaps = spec.softcap > 0, here.overlaps
    of_blocks = (
        block, block // LEAF, levels(block // LEAF), capped, spec.scaled, top_k, overlaps
    )  # fmt: skip
    of_rows = (
        j, levels(nodes), power_of_2(j) if j else 0, top_k, power_of_2(max(top_k, 1)),
        power_of_2(nodes * max(top_k, 1)), capped, spec.scaled, overlaps,
    )  # fmt: skip
    block_options = {"num_warps": 4 if top_k else WARPS, "launch_pdl": overlaps}
    row_options = {"num_warps": 4 if top_k else 1, "launch_pdl": overlaps}
    return nodes, of_blocks, of_rows, block_options, row_options


def backward(logits: Tensor, target: Tensor, root: Tensor, g: Tensor, spec: LogitOptions) -> Tensor:
    """dlogits[T, V]."""
    t, v = logits.shape
    dx = torch.empty(t, v, dtype=logits.dtype, device=logits.device)
    if t:
        block = block_columns(facts(logits.device).interpreted)
        _logp_bwd_kernel[(t, cdiv(v, block))](
            logits, target, root, g, dx, logits.stride(0), v, *spec.numbers, spec.slope,
            spec.inverse_top, block, spec.softcap > 0, spec.scaled,
            num_warps=4,
        )  # fmt: skip
    return dx
