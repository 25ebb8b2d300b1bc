"""softcap: y = c tanh(x / c), the cap of logits.

    y = round( sign(x) c (1 - t) / (1 + t) )     t = exp(-2 |x| / c)      fp32 arithmetic

These are the steps of `linear_logp`. There is no reduction. Gradient:
    dx = round( dy (1 - (y / c)^2) )

M = rows (all leading dimensions)   F = features
"""

import torch
from torch import Tensor

from rlk_kernels.backend import choose, two_backends
from rlk_kernels.custom_op import SECOND, call, custom_op
from rlk_kernels.device import lazy_module
from rlk_kernels.errors import UnsupportedDtype
from rlk_kernels.ops.softcap import portable


def softcap_ref(x: Tensor, cap: float) -> Tensor:
    """The formula in float64, for tests."""
    return cap * torch.tanh(x.double() / cap)


_module = two_backends(portable, lazy_module("rlk_kernels.ops.softcap.kernels"))


@custom_op(
    "softcap_backward", lambda y, *rest: y.new_empty(y.shape), no_gradient=("softcap", SECOND)
)
def _softcap_backward(y: Tensor, dy: Tensor, cap: float, backend: str) -> Tensor:
    return _module("softcap_backward", backend).backward(y, dy, cap)


def _setup(ctx, inputs, output):
    _, *ctx.options = inputs
    ctx.save_for_backward(output)


def _backward(ctx, dy):
    return call(_softcap_backward, *ctx.saved_tensors, dy.contiguous(), *ctx.options), None, None


@custom_op("softcap", lambda x, *rest: x.new_empty(x.shape), setup=_setup, backward=_backward)
def _softcap(x: Tensor, cap: float, backend: str) -> Tensor:
    return _module("softcap", backend).forward(x, cap)


def softcap(x: Tensor, cap: float, *, backend: str | None = None) -> Tensor:
    """cap * tanh(x / cap) for x[..., F] in bfloat16, float16 or float32 (float64 on the torch
    backend). Raises UnsupportedDtype, ValueError."""
    if not x.is_floating_point():
        raise UnsupportedDtype(f"softcap: x is {x.dtype}; a floating dtype is needed")
    if not cap > 0:
        raise ValueError(f"softcap: cap must be above 0, not {cap}")
    chosen = choose("softcap", backend, x)
    f = x.shape[-1] if x.dim() else 1
    rows = x.contiguous().view(-1 if f else x.numel(), f)
    return call(_softcap, rows, float(cap), chosen).view(x.shape)
