"""rope: rotary position embedding of queries and keys.

    angle[t, i] = fp32(position[t]) * frequency[i]                             i < rotary_dim / 2
    frequency[i] = fp32(theta ** (-2 i / rotary_dim)), or inv_freq[i], for a scaled rope (llama3,
                   yarn, linear) or another rounding of theta **
    c, s = cos(angle), sin(angle)                      fp32, times an optional scaling (yarn's
                                                       attention factor), rounded to cos_sin_dtype
    y[i]        = round( x[i] * c - x[i'] * s )        fp32 arithmetic, one rounding
    y[i']       = round( x[i'] * c + x[i] * s )        i' = i + rotary_dim / 2; interleaved: the
                                                       pair (i, i') is (2 i, 2 i + 1)

Dimensions from rotary_dim on are copied. There is no reduction: an output depends only on its
own pair and position. The gradient is the rotation by -angle.

T = tokens   H = heads   D = head size   R = rotary_dim / 2
"""

import functools

import torch
from torch import Tensor

from rlk_kernels.backend import choose, record
from rlk_kernels.custom_op import call, custom_op
from rlk_kernels.device import lazy_module
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.ops.arguments import last_dense
from rlk_kernels.ops.rope import portable


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


_on_triton = lazy_module("rlk_kernels.ops.rope.kernels")


def rotate(
    q: Tensor, k: Tensor, positions: Tensor, inv_freq: Tensor | None, scaling: Tensor | None,
    theta: float, rotary_dim: int, sign: float, cos_sin_dtype: torch.dtype, interleaved: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotate q and k by `sign` times their angles."""
    record("rope", backend)
    frequency = _frequencies(theta, rotary_dim, q.device) if inv_freq is None else inv_freq
    options = (positions, frequency, scaling, sign, cos_sin_dtype, interleaved)
    if backend == "torch":
        return portable.rotate(q, *options), portable.rotate(k, *options)
    return _on_triton().rotate(q, k, *options)


def empty_heads(q: Tensor, k: Tensor, *rest) -> tuple[Tensor, Tensor]:
    """The fake results of an operator whose results have the shapes of q and k."""
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _setup(ctx, inputs, output):
    _, _, positions, inv_freq, scaling, *ctx.rest = inputs
    ctx.save_for_backward(positions, inv_freq, scaling)


def _backward(ctx, dq, dk):
    theta, rotary_dim, sign, *rest = ctx.rest
    grads = call(
        _rope, dq.contiguous(), dk.contiguous(), *ctx.saved_tensors, theta, rotary_dim, -sign, *rest
    )
    return (*grads, *(None,) * 9)


_rope = custom_op("rope", empty_heads, setup=_setup, backward=_backward)(rotate)


def check_rope(
    op: str, q: Tensor, k: Tensor, positions: Tensor, theta: float | None, inv_freq: Tensor | None,
    scaling: Tensor | None, rotary_dim: int | None, cos_sin_dtype: torch.dtype,
) -> int:  # fmt: skip
    """The rotary size; raises what `rope` raises for these arguments."""
    if (theta is None) == (inv_freq is None):
        raise ValueError(f"{op}: give exactly one of theta and inv_freq")
    if theta is not None and not theta > 0:
        raise ValueError(f"{op}: theta must be above 0, not {theta}")
    if q.dim() != 3 or k.dim() != 3 or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise UnsupportedShape(
            f"{op}: q[T, Hq, D] and k[T, Hk, D] are needed, not {tuple(q.shape)}, {tuple(k.shape)}"
        )
    integers = not positions.is_floating_point() and positions.dtype != torch.bool
    if positions.shape != q.shape[:1] or not integers:
        raise UnsupportedShape(
            f"{op}: positions must be {q.shape[0]} integers, not {positions.dtype} "
            f"{tuple(positions.shape)}"
        )
    default = q.shape[2] if inv_freq is None else 2 * inv_freq.numel()
    size = default if rotary_dim is None else rotary_dim
    if size % 2 or not 0 < size <= q.shape[2]:
        raise UnsupportedShape(f"{op}: rotary_dim {size} must be even and at most {q.shape[2]}")
    if inv_freq is not None and inv_freq.shape != (size // 2,):
        raise UnsupportedShape(
            f"{op}: inv_freq {tuple(inv_freq.shape)} must have {size // 2} frequencies"
        )
    if scaling is not None and scaling.shape != (1,):
        raise UnsupportedShape(f"{op}: scaling {tuple(scaling.shape)} must have one number")
    for name, x in (("inv_freq", inv_freq), ("scaling", scaling)):
        if x is not None and x.dtype != torch.float32:
            raise UnsupportedDtype(f"{op}: {name} is {x.dtype}; float32 is needed")
    if cos_sin_dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise UnsupportedDtype(
            f"{op}: cos_sin_dtype is {cos_sin_dtype}; a floating dtype of 16 or 32 bits is needed"
        )
    return size


def rope(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    *,
    theta: float | None = None,
    inv_freq: Tensor | None = None,
    scaling: Tensor | None = None,
    rotary_dim: int | None = None,
    cos_sin_dtype: torch.dtype = torch.float32,
    interleaved: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate q[T, Hq, D] and k[T, Hk, D] by positions[T] (integers, |position| < 2**20).

    The frequencies come from theta, or are inv_freq[R] in float32 (those of an engine, scaled or
    not). cos and sin are multiplied by scaling[1] in float32 (yarn's attention factor) before they
    are rounded, for gradients too. q, k: bfloat16, float16, float32 (float64 on the torch backend).
    rotary_dim is even and at most D, and defaults to 2 R with inv_freq, otherwise to D.
    cos_sin_dtype is float32, bfloat16 or float16 (the table of vLLM has the model's dtype, that of
    HF float32). Inputs are not modified. Raises UnsupportedShape, UnsupportedDtype, and ValueError
    unless exactly one of theta, above 0, and inv_freq is given.
    """
    size = check_rope("rope", q, k, positions, theta, inv_freq, scaling, rotary_dim, cos_sin_dtype)
    frequency = None if inv_freq is None else inv_freq.detach().contiguous()
    factor = None if scaling is None else scaling.detach()
    chosen = choose("rope", backend, q, k, positions, inv_freq, scaling)
    if k.dtype != q.dtype:
        chosen = choose("rope", backend, k, q)
    q, k = last_dense(q), last_dense(k)
    return call(
        _rope, q, k, positions.contiguous(), frequency, factor, float(theta or 0.0), size, 1.0,
        cos_sin_dtype, interleaved, chosen,
    )  # fmt: skip
