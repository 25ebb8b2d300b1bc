"""Attention sinks: one logit for each head that is part of the softmax and has no value.

    lse' = log( exp(lse) + exp(sink[h]) )          out' = round( out exp(lse - lse') )
    dsink[h] = - sum_t exp(sink[h] - lse'[h, t]) (do[t, h] . out'[t, h])

Both are computed from the rounded out and the lse of the keys, so a row's bits depend only on its
own out, lse and sink. The sum over rows is in the order of `column_sum`. With out' and lse' instead
of out and lse, the gradients of q, k and v are those of attention.

T = queries   H = query heads   D = head size
"""

import math

import torch
from torch import Tensor

from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.numerics import elementary
from rlk_kernels.numerics.column_sum.operator import column_sum
from rlk_kernels.numerics.rows import tree_sum


def check(op: str, sinks: Tensor, heads: int, *dtypes: torch.dtype) -> None:
    """Raise unless sinks are [heads] of float32 or one of `dtypes`."""
    if sinks.shape != (heads,):
        raise UnsupportedShape(f"{op}: sinks[{heads}] are needed, not {tuple(sinks.shape)}")
    if sinks.dtype not in (torch.float32, *dtypes):
        words = " or ".join(str(each) for each in dict.fromkeys((torch.float32, *dtypes)))
        raise UnsupportedDtype(f"{op}: sinks are {sinks.dtype}; {words} is needed")


def _portable(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    sink, keys = sinks.double()[:, None].expand_as(lse), lse.double()
    top = torch.maximum(sink, keys)
    less = elementary.exp((torch.minimum(sink, keys) - top).clamp(min=-700.0))
    less = torch.where(torch.minimum(sink, keys) == -math.inf, 0.0, less)
    more = top + elementary.log(1.0 + less)
    weight = torch.where(keys == -math.inf, 0.0, elementary.exp((keys - more).clamp(min=-700.0)))
    scaled = (out.double() * weight.T[..., None]).to(lse.dtype).to(out.dtype)
    return scaled, more.to(lse.dtype)


def add(out: Tensor, lse: Tensor, sinks: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """(out', lse') of out[T, H, D] and lse[H, T], on triton in the memory of out and lse."""
    if backend == "torch":
        return _portable(out, lse, sinks)
    from rlk_kernels.ops.attention import sinks_kernels

    return sinks_kernels.add(out, lse, sinks)


def gradient(out: Tensor, lse: Tensor, sinks: Tensor, do: Tensor, backend: str) -> Tensor:
    """dsink[H] of out', lse' and do[T, H, D]."""
    if backend == "torch":
        sink, whole = sinks.double()[:, None].expand_as(lse), lse.double()
        share = elementary.exp((sink - whole).clamp(min=-700.0))
        share = torch.where(sink == -math.inf, 0.0, share).T
        parts = -share * tree_sum(out.double() * do.double()).squeeze(-1)
        return column_sum(parts.float(), backend)
    from rlk_kernels.ops.attention import sinks_kernels

    return column_sum(sinks_kernels.gradient_parts(out, lse, sinks, do), backend)
