"""logp: log-probability of one token per row of logits.

    z[v]  = fp32(logits[t, v]) * fp32(1 / temperature)                    fp32, one rounding
    logp  = log(exp(z[target]) / sum_v exp(z[v]))

Reduction order: the binary tree of `lse_tree.py` over the columns, from leaves of 16. A program
takes a block of columns, a whole subtree, and its node is written; blocks are merged by the same
tree. With (n, s) of the row, logp = (y - log2 s) log(2), y = z[target] log2(e) - n.
torch backend: the same tree in fp64, in natural units. The bits are those of `linear_logp`.

Gradient: dlogits[v] = round( g / temperature * ([v == target] - p[v]) ), p in fp32.
A negative target (ignored tokens) gives logp 0 and no gradient.

T = rows   V = vocabulary
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels import elementary
from rlk_kernels.backend import choose, interpreting, overlapping, record
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.exact import by_rows
from rlk_kernels.lse_tree import (
    LEAF,
    LN2,
    NO_COLUMNS,
    block_portable,
    leaf_stats_of_halves,
    levels,
    merge_neighbours,
    scaled,
)

COLUMNS, WARPS = 4096, 1
"""Columns of a program, and its warps: they change no bit."""


def block_columns() -> int:
    """Columns of one program: a power of two, so a whole subtree; changes no bit."""
    return 256 if interpreting() else COLUMNS


def logp_ref(logits: Tensor, target: Tensor, temperature: float = 1.0) -> Tensor:
    """The formula in float64, for tests."""
    z = logits.double() / temperature
    return torch.log_softmax(z, -1).gather(-1, target[:, None].long()).squeeze(-1)


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
    dx = tl.where(target < 0, 0.0, dx)
    tl.store(dx_ptr + row * V + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < V)


def _inverse(temperature: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(1.0 / temperature, dtype=dtype))


def _forward_portable(logits, target, temperature):
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    z = (logits.to(wide) * _inverse(temperature, wide)).double()
    m, s = block_portable(z)
    log_s = elementary.log(s)
    chosen = z.gather(-1, target.long().clamp(min=0)[:, None]).squeeze(-1)
    logp = torch.where(target < 0, 0.0, (chosen - m) - log_s)
    return logp.to(wide), m, log_s


def _backward_portable(logits, target, m, log_s, g, temperature):
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    z = (logits.to(wide) * _inverse(temperature, wide)).double()
    p = elementary.exp((z - m[:, None]) - log_s[:, None])
    one = torch.zeros_like(p).scatter_(1, target.long().clamp(min=0)[:, None], 1.0)
    dx = (g.double() * _inverse(temperature, wide))[:, None] * (one - p)
    return torch.where((target < 0)[:, None], 0.0, dx).to(wide).to(logits.dtype)


@torch.library.custom_op("rlk::logp", mutates_args=())
def _logp(
    logits: Tensor, target: Tensor, temperature: float, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    record("logp", backend)
    if backend == "torch":
        v = logits.shape[1]
        if target.numel() and int(target.max()) >= v:
            raise IndexError(f"logp: a target of {int(target.max())} is not below V = {v}")
        return by_rows(lambda x, own: _forward_portable(x, own, temperature), logits, target)
    t, v = logits.shape
    inverse = _inverse(temperature, torch.float32)
    logp, m, log_s = (torch.empty(t, dtype=torch.float32, device=logits.device) for _ in range(3))
    block = block_columns()
    nodes = triton.cdiv(v, block)
    overlap = overlapping(logits.device)
    stats = torch.empty(t, nodes, 2, dtype=torch.float32, device=logits.device)
    if t:
        _logp_blocks_kernel[(t, nodes)](
            logits, stats, logits.stride(0), v, nodes, inverse, block, block // LEAF,
            levels(block // LEAF), inverse != 1.0, overlap, num_warps=WARPS, launch_pdl=overlap,
        )  # fmt: skip
        _logp_row_kernel[(t,)](
            logits, target, stats, logp, m, log_s, logits.stride(0), v, nodes, inverse,
            levels(nodes), overlap, num_warps=1, launch_pdl=overlap,
        )  # fmt: skip
    return logp, m, log_s


@_logp.register_fake
def _(logits, target, temperature, backend):
    wide = torch.promote_types(logits.dtype, torch.float32)
    stat = torch.float64 if backend == "torch" else torch.float32
    shape = logits.shape[:1]
    return tuple(logits.new_empty(shape, dtype=d) for d in (wide, stat, stat))


@torch.library.custom_op("rlk::logp_backward", mutates_args=())
def _logp_backward(
    logits: Tensor, target: Tensor, m: Tensor, log_s: Tensor, g: Tensor, temperature: float,
    backend: str,
) -> Tensor:  # fmt: skip
    record("logp_backward", backend)
    if backend == "torch":
        return by_rows(
            lambda x, own, m, log_s, g: _backward_portable(x, own, m, log_s, g, temperature),
            logits, target, m, log_s, g,
        )  # fmt: skip
    t, v = logits.shape
    inverse = _inverse(temperature, torch.float32)
    dx = torch.empty(t, v, dtype=logits.dtype, device=logits.device)
    if t:
        block = block_columns()
        _logp_bwd_kernel[(t, triton.cdiv(v, block))](
            logits, target, m, log_s, g, dx, logits.stride(0), v, inverse, block, num_warps=4
        )
    return dx


@_logp_backward.register_fake
def _(logits, target, m, log_s, g, temperature, backend):
    return logits.new_empty(logits.shape)


def _setup(ctx, inputs, output):
    logits, target, ctx.temperature, ctx.backend = inputs
    ctx.save_for_backward(logits, target, output[1], output[2])
    ctx.set_materialize_grads(False)


def _backward(ctx, g, _m, _log_s):
    logits, target, m, log_s = ctx.saved_tensors
    if g is None:
        return None, None, None, None
    dx = _logp_backward(logits, target, m, log_s, g.contiguous(), ctx.temperature, ctx.backend)
    return dx, None, None, None


_logp.register_autograd(_backward, setup_context=_setup)


def logp(
    logits: Tensor, target: Tensor, *, temperature: float = 1.0, backend: str | None = None
) -> Tensor:
    """log softmax(logits / temperature)[t, target[t]] -> [T] float32 (float64 for float64).

    logits[T, V]: bfloat16, float16, float32 (float64 on the torch backend), V >= 1; target[T]
    int32 or int64 below V, negative to ignore; temperature > 0. A target of V or more raises
    IndexError on the torch backend and gives NaN on the GPU. Raises UnsupportedShape,
    UnsupportedDtype, ValueError.
    """
    if logits.dim() != 2 or target.shape != logits.shape[:1] or logits.shape[1] == 0:
        raise UnsupportedShape(
            f"logp: logits[T, V] and target[T] are needed, not {tuple(logits.shape)} and "
            f"{tuple(target.shape)}"
        )
    if target.dtype not in (torch.int32, torch.int64) or not logits.is_floating_point():
        raise UnsupportedDtype(f"logp: logits are {logits.dtype}, target is {target.dtype}")
    if not temperature > 0:
        raise ValueError(f"logp: temperature must be above 0, not {temperature}")
    chosen = choose("logp", backend, logits, target)
    rows = logits if logits.stride(1) == 1 else logits.contiguous()
    return _logp(rows, target.contiguous(), float(temperature), chosen)[0]
