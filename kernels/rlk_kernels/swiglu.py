"""swiglu: y = silu(gate) * up.

    y = round( gate / (1 + exp(-gate)) * up )           fp32 arithmetic, one rounding

No reduction: an output is a function of its own two inputs. Gradients, with s = sigmoid(gate):
    dgate = round( dy * up * s * (1 + gate * (1 - s)) )      dup = round( dy * gate * s )

M = rows (all leading dimensions)   F = features
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.backend import choose, record
from rlk_kernels.elementary import sigmoid
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.exact import by_rows

BLOCK = 2048


def swiglu_ref(gate: Tensor, up: Tensor) -> Tensor:
    """The formula in float64, for tests."""
    return torch.nn.functional.silu(gate.double()) * up.double()


@triton.jit
def _swiglu_fwd_kernel(g_ptr, u_ptr, y_ptr, stride_g, stride_u, F, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < F
    g = tl.load(g_ptr + row * stride_g + cols, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + row * stride_u + cols, mask=mask, other=0.0).to(tl.float32)
    y = g / (1.0 + tl.exp(-g)) * u
    tl.store(y_ptr + row * F + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_bwd_kernel(
    g_ptr, u_ptr, dy_ptr, dg_ptr, du_ptr, stride_g, stride_u, F, BLOCK: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < F
    g = tl.load(g_ptr + row * stride_g + cols, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + row * stride_u + cols, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * F + cols, mask=mask, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-g))
    dg = dy * u * s * (1.0 + g * (1.0 - s))
    tl.store(dg_ptr + row * F + cols, dg.to(dg_ptr.dtype.element_ty), mask=mask)
    tl.store(du_ptr + row * F + cols, (dy * g * s).to(du_ptr.dtype.element_ty), mask=mask)


def _grids(m: int, f: int) -> list[tuple[int, tuple[int, int]]]:
    """(first row, grid) pieces: CUDA allows 65535 blocks along the second axis."""
    columns = triton.cdiv(f, BLOCK)
    return [(start, (columns, min(65535, m - start))) for start in range(0, m if f else 0, 65535)]


def _forward_portable(gate: Tensor, up: Tensor) -> Tensor:
    wide = torch.float64 if gate.dtype == torch.float64 else torch.float32
    g = gate.double()
    return (g * sigmoid(g) * up.double()).to(wide).to(gate.dtype)


def _backward_portable(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if gate.dtype == torch.float64 else torch.float32
    g, d = gate.double(), dy.double()
    s = sigmoid(g)
    dg = d * up.double() * s * (1.0 + g * (1.0 - s))
    return dg.to(wide).to(gate.dtype), (d * g * s).to(wide).to(gate.dtype)


@torch.library.custom_op("rlk::swiglu", mutates_args=())
def _swiglu(gate: Tensor, up: Tensor, backend: str) -> Tensor:
    record("swiglu", backend)
    if backend == "torch":
        return by_rows(_forward_portable, gate, up)
    m, f = gate.shape
    y = torch.empty(m, f, dtype=gate.dtype, device=gate.device)
    for start, grid in _grids(m, f):
        _swiglu_fwd_kernel[grid](
            gate[start:], up[start:], y[start:], gate.stride(0), up.stride(0), f, BLOCK, num_warps=4
        )
    return y


@_swiglu.register_fake
def _(gate, up, backend):
    return gate.new_empty(gate.shape)


@torch.library.custom_op("rlk::swiglu_backward", mutates_args=())
def _swiglu_backward(gate: Tensor, up: Tensor, dy: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    record("swiglu_backward", backend)
    if backend == "torch":
        return by_rows(_backward_portable, gate, up, dy)
    m, f = gate.shape
    dg = torch.empty(m, f, dtype=gate.dtype, device=gate.device)
    du = torch.empty_like(dg)
    for start, grid in _grids(m, f):
        _swiglu_bwd_kernel[grid](
            gate[start:], up[start:], dy[start:], dg[start:], du[start:],
            gate.stride(0), up.stride(0), f, BLOCK, num_warps=4,
        )  # fmt: skip
    return dg, du


@_swiglu_backward.register_fake
def _(gate, up, dy, backend):
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


def _setup(ctx, inputs, output):
    gate, up, ctx.backend = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx, dy):
    gate, up = ctx.saved_tensors
    dg, du = _swiglu_backward(gate, up, dy.contiguous(), ctx.backend)
    return dg, du, None


_swiglu.register_autograd(_backward, setup_context=_setup)


def swiglu(gate: Tensor, up: Tensor, *, backend: str | None = None) -> Tensor:
    """silu(gate) * up for gate[..., F], up[..., F] of one dtype (bfloat16, float16, float32;
    float64 on the torch backend). Halves of a fused gate_up tensor are read in place.
    Raises UnsupportedShape, UnsupportedDtype.
    """
    if gate.shape != up.shape or gate.dim() < 1:
        raise UnsupportedShape(f"swiglu: gate {tuple(gate.shape)} and up {tuple(up.shape)} differ")
    if gate.dtype != up.dtype or not gate.is_floating_point():
        raise UnsupportedDtype(f"swiglu: gate is {gate.dtype} and up is {up.dtype}")
    chosen = choose("swiglu", backend, gate, up)
    f = gate.shape[-1]
    rows = [t.reshape(-1 if f else t.shape[:-1].numel(), f) for t in (gate, up)]
    rows = [t if t.stride(-1) == 1 else t.contiguous() for t in rows]
    return _swiglu(rows[0], rows[1], chosen).reshape(gate.shape)
