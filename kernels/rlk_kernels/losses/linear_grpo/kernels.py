"""The elementwise kernels of `launch.py`, which have no order of summation.

    token_gradient   dloss/dlogp of a chunk of tokens in fp32, and the factors from E to dlogits
    rebase           bring E of a node to the reference of its row, in place
    clear_dead_rows  set E of a row that is not finite and has no gradient to zero, in place
    scale_rows       x[m] c[m], rounded once; 0 where c is 0, for x = NaN too
    scale            a gradient times its upstream gradient, in place

T = tokens   V = vocabulary   M, N = rows and columns
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.device import facts
from rlk_kernels.losses.policy.kernels import unclipped_term
from rlk_kernels.losses.policy.objective import Objective
from rlk_kernels.matmul.epilogue import reference_exponent
from rlk_kernels.ops.linear_logp.options import RowStatistics

REBASE_NODES, REBASE_ROWS, REBASE_STEP = 32, 128, 16
"""Nodes and rows of a program of `_rebase_kernel`, and its rows in a step (time only)."""
SCALE_BLOCK = 8192
"""Elements of a step of `_scale_kernel` (time only)."""


@triton.jit(do_not_specialize=["T"])
def _token_gradient_kernel(
    logp_ptr, old_ptr, advantage_ptr, ref_ptr, w_ptr, id_ptr, n_ptr, s_ptr, z_ptr, g_ptr, a_ptr,
    c_ptr, T, low, high, beta, slope, PENALTY: tl.constexpr, HALF: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """g = w dloss/dlogp dz/dx (`objective.token_terms` in fp32), a = -g, and c: dlogits = c E."""
    rows = tl.program_id(0) * B + tl.arange(0, B)
    on = rows < T
    logp = tl.load(logp_ptr + rows, mask=on, other=0.0)
    ratio = tl.exp(logp - tl.load(old_ptr + rows, mask=on, other=0.0).to(tl.float32))
    advantage = tl.load(advantage_ptr + rows, mask=on, other=0).to(tl.float32)
    unclipped = unclipped_term(ratio, advantage)
    clipped = tl.minimum(tl.maximum(ratio, low), high) * advantage
    g = tl.where(unclipped > clipped, 0.0, -unclipped)
    if PENALTY:
        ref = tl.load(ref_ptr + rows, mask=on, other=0.0).to(tl.float32)
        g -= beta * (tl.exp(ref - logp) - 1.0)
    w = tl.load(w_ptr + rows, mask=on, other=0.0).to(tl.float32)
    id = tl.load(id_ptr + rows, mask=on, other=-1)
    g = tl.where((w == 0.0) | (id < 0), 0.0, g * w * slope)
    tl.store(g_ptr + rows, g, mask=on)
    tl.store(a_ptr + rows, -g, mask=on)
    n = tl.load(n_ptr + rows, mask=on, other=0.0)
    log_s = tl.load(s_ptr + rows, mask=on, other=0.0)
    r = reference_exponent(n, tl.load(z_ptr + rows, mask=on, other=0.0), HALF)
    c = -g * tl.exp2((r - n) - log_s)
    tl.store(c_ptr + rows, tl.where((g == 0.0) & (c != c), 0.0, c), mask=on)


@triton.jit(do_not_specialize=["T"])
def _rebase_kernel(
    out_ptr, node_n_ptr, n_ptr, z_ptr, T, V, nodes, stride, BN: tl.constexpr,
    NODES: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Bring EXPONENTIALS from the reference of their node to that of their row, in place."""
    first_node = tl.program_id(0) * NODES
    first = tl.program_id(1) * ROWS
    some = tl.minimum(first_node + tl.arange(0, NODES), nodes - 1)[:, None]
    rows = (first + tl.arange(0, ROWS)).to(tl.int64)
    HALF: tl.constexpr = out_ptr.dtype.element_ty == tl.float16
    differs = _exponent_difference(node_n_ptr, n_ptr, z_ptr, some, rows[None, :], T, HALF) != 0.0
    if tl.max(differs.to(tl.int32)) > 0:
        for step in range(NODES * ROWS // STEP):
            node = first_node + step // (ROWS // STEP)
            if node < nodes:
                part = (first + step % (ROWS // STEP) * STEP + tl.arange(0, STEP)).to(tl.int64)
                down = _exponent_difference(node_n_ptr, n_ptr, z_ptr, node, part, T, HALF)
                cols = node * BN + tl.arange(0, BN)
                at = out_ptr + part[:, None] * stride + cols[None, :]
                mask = (down != 0.0)[:, None] & (cols[None, :] < V)
                e = tl.load(at, mask=mask, other=0.0).to(tl.float32)
                tl.store(at, (e * tl.exp2(down)[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _exponent_difference(node_n_ptr, n_ptr, z_ptr, node, rows, T, HALF: tl.constexpr):
    """The reference of the node minus the reference of the row."""
    inside = rows < T
    z = tl.load(z_ptr + rows, mask=inside, other=0.0)
    node_n = tl.load(node_n_ptr + node.to(tl.int64) * T + rows, mask=inside, other=0.0)
    n = tl.load(n_ptr + rows, mask=inside, other=0.0)
    return reference_exponent(node_n, z, HALF) - reference_exponent(n, z, HALF)


@triton.jit(do_not_specialize=["M"])
def _scale_rows_kernel(
    x_ptr, c_ptr, out_ptr, M, N, stride_x, stride_out, BM: tl.constexpr, BN: tl.constexpr
):
    rows = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    mask = (rows < M)[:, None] & (cols < N)
    c = tl.load(c_ptr + rows, mask=rows < M, other=0.0)[:, None]
    x = tl.load(x_ptr + rows[:, None] * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
    x = tl.where((c == 0.0) & (x * c != x * c), 0.0, x * c)
    at = out_ptr + rows[:, None] * stride_out + cols
    tl.store(at, x.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _clear_dead_rows_kernel(e_ptr, g_ptr, s_ptr, V, stride, B: tl.constexpr):
    """Set the exponentials of a row that has no gradient and is not finite to zero."""
    row = tl.program_id(0).to(tl.int64)
    log_s = tl.load(s_ptr + row)
    if (tl.load(g_ptr + row) == 0.0) & (log_s - log_s != 0.0):
        for first in range(0, V, B):
            cols = first + tl.arange(0, B)
            zeros = tl.zeros((B,), e_ptr.dtype.element_ty)
            tl.store(e_ptr + row * stride + cols, zeros, mask=cols < V)


@triton.jit
def _scale_kernel(x_ptr, factor_ptr, size, B: tl.constexpr):
    """x *= factor in place; a factor of 1 reads and writes nothing."""
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        step = tl.num_programs(0).to(tl.int64) * B
        for first in range(tl.program_id(0).to(tl.int64) * B, size, step):
            at = first + tl.arange(0, B)
            x = tl.load(x_ptr + at, mask=at < size, other=0.0)
            x = (x.to(tl.float32) * factor).to(x_ptr.dtype.element_ty)
            tl.store(x_ptr + at, x, mask=at < size)


def token_gradient(
    rows: RowStatistics, ids: Tensor, old_logp: Tensor | None, advantages: Tensor,
    ref_logp: Tensor | None, weights: Tensor, objective: Objective, slope: float, half: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(g, a, c)[T] of `_token_gradient_kernel`, in fp32; half: E is in fp16."""
    logp = rows.logp
    g, a, c = (torch.empty_like(logp) for _ in range(3))
    penalty = ref_logp is not None and objective.beta > 0
    _token_gradient_kernel[(triton.cdiv(logp.shape[0], 256),)](
        logp, logp if old_logp is None else old_logp, advantages, ref_logp, weights, ids, rows.n,
        rows.log_s, rows.z, g, a, c, logp.shape[0], 1.0 - objective.low, 1.0 + objective.high,
        objective.beta, slope, penalty, half, 256,
    )  # fmt: skip
    return g, a, c


def rebase(out: Tensor, node_n: Tensor, rows: RowStatistics, width: int) -> None:
    """Bring exponentials out[T, V] to one reference for each row, in place; node_n[nodes, T]: the
    exponents of nodes of `width` columns."""
    (t, v), nodes = out.shape, node_n.shape[0]
    _rebase_kernel[(triton.cdiv(nodes, REBASE_NODES), triton.cdiv(t, REBASE_ROWS))](
        out, node_n, rows.n, rows.z, t, v, nodes, out.stride(0), width, REBASE_NODES, REBASE_ROWS,
        REBASE_STEP, num_warps=4,
    )  # fmt: skip


def clear_dead_rows(out: Tensor, g: Tensor, rows: RowStatistics) -> None:
    """Set exponentials out[T, V] to zero in rows that are not finite and whose g[T] is 0."""
    t, v = out.shape
    _clear_dead_rows_kernel[(t,)](out, g, rows.log_s, v, out.stride(0), 4096, num_warps=4)


def scale_rows(x: Tensor, c: Tensor, out: Tensor) -> Tensor:
    """out[M, N] = x[M, N] c[M] in fp32, rounded once to x's dtype; rows are dense, out may be x."""
    (m, n), bm, bn = x.shape, 8, 512
    _scale_rows_kernel[(triton.cdiv(m, bm), triton.cdiv(n, bn))](
        x, c, out, m, n, x.stride(0), out.stride(0), bm, bn, num_warps=4
    )
    return out


def scale(x: Tensor, factor: Tensor) -> Tensor:
    """x *= factor[()] in place, with at most four programs a processor; returns x."""
    blocks = triton.cdiv(x.numel(), SCALE_BLOCK)
    programs = min(blocks, 4 * facts(x.device).processors)
    _scale_kernel[(programs,)](x, factor, x.numel(), SCALE_BLOCK, num_warps=8)
    return x
