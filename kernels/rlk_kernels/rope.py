"""rope: rotary position embedding of queries and keys.

    angle[t, i] = fp32(position[t]) * fp32(theta ** (-2 i / rotary_dim))      i < rotary_dim / 2
    c, s = cos(angle), sin(angle)                      fp32, rounded to cos_sin_dtype
    y[i]        = round( x[i] * c - x[i'] * s )        fp32 arithmetic, one rounding
    y[i']       = round( x[i'] * c + x[i] * s )        i' = i + rotary_dim / 2; interleaved: the
                                                       pair (i, i') is (2 i, 2 i + 1)

Dimensions from rotary_dim on are copied. There is no reduction: an output is a function of its
own pair and position. The gradient is the rotation by -angle.

T = tokens   H = heads   D = head size   R = rotary_dim / 2
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.backend import choose, overlapping, record
from rlk_kernels.elementary import sin_cos
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape

HEADS_AT_A_TIME = 32
MANY_TOKENS = 2048
"""From here on a program walks all heads of its token, and computes its angles once."""


@functools.cache
def _frequencies(theta: float, rotary_dim: int, device: torch.device) -> Tensor:
    values = [theta ** (-2.0 * i / rotary_dim) for i in range(rotary_dim // 2)]
    return torch.tensor(values, dtype=torch.float32).to(device)


def rope_ref(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """The formula in float64 for full rotary size, not interleaved, for tests."""
    half = x.shape[-1] // 2
    frequency = _frequencies(theta, x.shape[-1], x.device)
    angle = (positions.float()[:, None] * frequency).double()[:, None, :]
    a, b = x.double()[..., :half], x.double()[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


@triton.jit(do_not_specialize=["STEPS"])
def _rope_kernel(
    x_ptr, y_ptr, pos_ptr, freq_ptr, stride_t, stride_h, sign, H, STEPS,
    D: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, TAIL: tl.constexpr, HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr, ROUND: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, RP)
    angle = tl.load(pos_ptr + token).to(tl.float32) * tl.load(freq_ptr + i, mask=i < R, other=0.0)
    cos = tl.cos(angle).to(ROUND).to(tl.float32)[None, :]
    sin = (tl.sin(angle).to(ROUND).to(tl.float32) * sign)[None, :]
    i = i[None, :]
    first = 2 * i if INTERLEAVED else i
    second = 2 * i + 1 if INTERLEAVED else i + R
    for step in range(STEPS):
        heads = (tl.program_id(1) * STEPS + step) * HEADS + tl.arange(0, HEADS)[:, None]
        mask = (heads < H) & (i < R)
        x_at = x_ptr + token * stride_t + heads * stride_h
        y_at = y_ptr + (token * H + heads) * D
        a = tl.load(x_at + first, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(x_at + second, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_at + first, (a * cos - b * sin).to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(y_at + second, (b * cos + a * sin).to(y_ptr.dtype.element_ty), mask=mask)
        if TAIL > 0:
            rest = 2 * R + tl.arange(0, TAIL)[None, :]
            mask = (heads < H) & (rest < D)
            tl.store(y_at + rest, tl.load(x_at + rest, mask=mask), mask=mask)


def _rope_triton(x, positions, frequency, sign, round_to, interleaved):
    t, h, d = x.shape
    y = torch.empty(t, h, d, dtype=x.dtype, device=x.device)
    r = frequency.numel()
    tail = triton.next_power_of_2(d - 2 * r) if d > 2 * r else 0
    dtypes = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    if t and h:
        heads = min(HEADS_AT_A_TIME, triton.next_power_of_2(h)) if t >= MANY_TOKENS else 8
        overlap = overlapping(x.device)
        groups = triton.cdiv(h, heads)
        steps = groups if t >= MANY_TOKENS else 1
        _rope_kernel[(t, groups // steps)](
            x, y, positions, frequency, x.stride(0), x.stride(1), sign, h, steps, d, r,
            triton.next_power_of_2(r), tail, heads, interleaved, dtypes[round_to], overlap,
            num_warps=2, launch_pdl=overlap,
        )  # fmt: skip
    return y


def _rope_portable(x, positions, frequency, sign, round_to, interleaved):
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    r = frequency.numel()
    angle = positions.to(torch.float32)[:, None] * frequency
    sin, cos = (v.to(torch.float32).to(round_to).to(wide)[:, None, :] for v in sin_cos(angle))
    sin = sin * sign
    y = x.clone(memory_format=torch.contiguous_format)
    first = slice(0, 2 * r, 2) if interleaved else slice(0, r)
    second = slice(1, 2 * r, 2) if interleaved else slice(r, 2 * r)
    a, b = x[..., first].to(wide), x[..., second].to(wide)
    y[..., first] = (a * cos - b * sin).to(x.dtype)
    y[..., second] = (b * cos + a * sin).to(x.dtype)
    return y


@torch.library.custom_op("rlk::rope", mutates_args=())
def _rope(
    x: Tensor, positions: Tensor, theta: float, rotary_dim: int, sign: float,
    cos_sin_dtype: torch.dtype, interleaved: bool, backend: str,
) -> Tensor:  # fmt: skip
    record("rope", backend)
    frequency = _frequencies(theta, rotary_dim, x.device)
    run = _rope_portable if backend == "torch" else _rope_triton
    return run(x, positions, frequency, sign, cos_sin_dtype, interleaved)


@_rope.register_fake
def _(x, positions, theta, rotary_dim, sign, cos_sin_dtype, interleaved, backend):
    return x.new_empty(x.shape)


def _setup(ctx, inputs, output):
    _, positions, *ctx.rest = inputs
    ctx.save_for_backward(positions)


def _backward(ctx, dy):
    theta, rotary_dim, sign, cos_sin_dtype, interleaved, backend = ctx.rest
    (positions,) = ctx.saved_tensors
    dx = _rope(
        dy.contiguous(), positions, theta, rotary_dim, -sign, cos_sin_dtype, interleaved, backend
    )
    return dx, None, None, None, None, None, None, None


_rope.register_autograd(_backward, setup_context=_setup)


def rope(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    *,
    theta: float,
    rotary_dim: int | None = None,
    cos_sin_dtype: torch.dtype = torch.float32,
    interleaved: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate q[T, Hq, D] and k[T, Hk, D] by positions[T] (integers, |position| < 2**20).

    bfloat16, float16, float32 (float64 on the torch backend); rotary_dim is even and at most D,
    and defaults to D; cos_sin_dtype is float32, bfloat16 or float16 (vLLM keeps its table in the
    model's dtype, HF in float32). Inputs are not modified.
    Raises UnsupportedShape, UnsupportedDtype, ValueError where theta is not above 0.
    """
    if not theta > 0:
        raise ValueError(f"rope: theta must be above 0, not {theta}")
    if q.dim() != 3 or k.dim() != 3 or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise UnsupportedShape(
            f"rope: q[T, Hq, D] and k[T, Hk, D] are needed, not {tuple(q.shape)}, {tuple(k.shape)}"
        )
    integers = not positions.is_floating_point() and positions.dtype != torch.bool
    if positions.shape != q.shape[:1] or not integers:
        raise UnsupportedShape(
            f"rope: positions must be {q.shape[0]} integers, not {positions.dtype} "
            f"{tuple(positions.shape)}"
        )
    size = q.shape[2] if rotary_dim is None else rotary_dim
    if size % 2 or not 0 < size <= q.shape[2]:
        raise UnsupportedShape(f"rope: rotary_dim {size} must be even and at most {q.shape[2]}")
    if cos_sin_dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise UnsupportedDtype(
            f"rope: cos_sin_dtype {cos_sin_dtype} is not a float of 16 or 32 bit"
        )
    out = []
    for x in (q, k):
        chosen = choose("rope", backend, x, positions, q)
        x = x if x.stride(-1) == 1 else x.contiguous()
        out.append(_rope(x, positions, float(theta), size, 1.0, cos_sin_dtype, interleaved, chosen))
    return out[0], out[1]
