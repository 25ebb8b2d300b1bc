"""norm_rope: RMS norm of each head of queries and keys, then the rotary embedding.

    q', k' = rope( rms_norm(q, q_weight), rms_norm(k, k_weight), positions )

It has the bits of the two operators and of their gradients: the norm of a head is computed over D
and rounded as in `rms_norm`, and rotated as in `rope`. On triton both are one launch; the backward
runs the two backwards.

T = tokens   H = heads   D = head size   R = rotary_dim / 2
"""

from typing import Any

import torch
from torch import Tensor

from rlk_kernels.backend import choose, record
from rlk_kernels.custom_op import call, custom_op
from rlk_kernels.device import lazy_module
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.ops.rms_norm.operator import CASTS, rms_norm_grad
from rlk_kernels.ops.rms_norm.operator import rms_norm as norm
from rlk_kernels.ops.rope.operator import _frequencies, _rope, check_rope, empty_heads, rotate

_on_triton = lazy_module("rlk_kernels.ops.norm_rope.kernels")


def _setup(ctx, inputs, output):
    *tensors, ctx.eps, _, ctx.one_plus, theta, rotary_dim, cos_sin_dtype, interleaved, backend = (
        inputs
    )
    ctx.save_for_backward(*tensors)
    ctx.rotation = theta, rotary_dim, cos_sin_dtype, interleaved, backend


def _backward(ctx, dq, dk):
    q, k, q_weight, k_weight, *how = ctx.saved_tensors
    theta, rotary_dim, cos_sin_dtype, interleaved, backend = ctx.rotation
    rotated = _rope(
        dq.contiguous(), dk.contiguous(), *how, theta, rotary_dim, -1.0, cos_sin_dtype,
        interleaved, backend,
    )  # fmt: skip
    grads, weights = [], []
    for x, weight, dy in ((q, q_weight, rotated[0]), (k, k_weight, rotated[1])):
        dx, dw = rms_norm_grad(x, weight, dy, ctx.eps, backend, one_plus=ctx.one_plus)
        grads.append(dx)
        weights.append(dw)
    return (*grads, *weights, *(None,) * 11)


@custom_op("norm_rope", empty_heads, setup=_setup, backward=_backward)
def _norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, positions: Tensor,
    inv_freq: Tensor | None, scaling: Tensor | None, eps: float, hf: bool, one_plus: bool,
    theta: float, rotary_dim: int, cos_sin_dtype: torch.dtype, interleaved: bool, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    record("norm_rope", backend)
    if backend == "torch":
        how: dict[str, Any] = {
            "cast": "hf" if hf else "vllm",
            "one_plus": one_plus,
            "backend": backend,
        }
        q, k = (norm(x, weight, eps, **how) for x, weight in ((q, q_weight), (k, k_weight)))
        return rotate(
            q, k, positions, inv_freq, scaling, theta, rotary_dim, 1.0, cos_sin_dtype, interleaved,
            backend,
        )  # fmt: skip
    frequency = _frequencies(theta, rotary_dim, q.device) if inv_freq is None else inv_freq
    return _on_triton().norm_rotate(
        q, k, q_weight, k_weight, positions, frequency, scaling, eps, hf, one_plus, cos_sin_dtype,
        interleaved,
    )  # fmt: skip


def norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    positions: Tensor,
    *,
    eps: float,
    cast: str = "hf",
    one_plus: bool = False,
    theta: float | None = None,
    inv_freq: Tensor | None = None,
    scaling: Tensor | None = None,
    rotary_dim: int | None = None,
    cos_sin_dtype: torch.dtype = torch.float32,
    interleaved: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Norm and rotate q[T, Hq, D] and k[T, Hk, D]; q_weight[D], k_weight[D] in their dtype or fp32.

    eps, cast and one_plus are those of `rms_norm`, the other options those of `rope`: the result
    has the bits of `rope(rms_norm(q), rms_norm(k))`. q and k have one dtype. Inputs are not
    modified. Raises UnsupportedShape, UnsupportedDtype, ValueError.
    """
    size = check_rope(
        "norm_rope", q, k, positions, theta, inv_freq, scaling, rotary_dim, cos_sin_dtype
    )
    if cast not in CASTS:
        raise ValueError(f"norm_rope: cast {cast!r} is unknown; choose from {list(CASTS)}")
    if not eps >= 0:
        raise ValueError(f"norm_rope: eps must not be negative, not {eps}")
    for weight in (q_weight, k_weight):
        if weight.shape != q.shape[2:]:
            raise UnsupportedShape(
                f"norm_rope: weights[{q.shape[2]}] are needed, not {tuple(weight.shape)}"
            )
        if weight.dtype not in (q.dtype, torch.float32):
            raise UnsupportedDtype(
                f"norm_rope: a weight is {weight.dtype}; {q.dtype} or float32 is needed"
            )
    if k.dtype != q.dtype or q_weight.dtype != k_weight.dtype:
        raise UnsupportedDtype(
            f"norm_rope: q and k are {q.dtype} and {k.dtype}, their weights {q_weight.dtype} and "
            f"{k_weight.dtype}; q and k need one dtype, and so do their weights"
        )
    frequency = None if inv_freq is None else inv_freq.detach().contiguous()
    factor = None if scaling is None else scaling.detach()
    chosen = choose("norm_rope", backend, q, k, positions, inv_freq, scaling, q_weight, k_weight)
    return call(
        _norm_rope, q, k, q_weight.contiguous(), k_weight.contiguous(), positions.contiguous(),
        frequency, factor, float(eps), cast == "hf", one_plus, float(theta or 0.0), size,
        cos_sin_dtype, interleaved, chosen,
    )  # fmt: skip
