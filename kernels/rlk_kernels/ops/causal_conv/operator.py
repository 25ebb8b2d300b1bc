"""causal_conv1d and cached_causal_conv1d: y[t, f] = silu( sum_j weight[f, j] x[t - W + 1 + j, f] ).

    y = round( p / (1 + exp(-p)) )    p = the sum over the taps j = 0, 1, ..., W - 1, in this order

in fp32 (float64 on the torch backend), with one rounding. Rows before the first row of a sequence
are 0. A row depends on the last W rows of its own sequence alone; a cache keeps the W - 1 raw rows
before the next one. Gradients, with s = 1 / (1 + exp(-p)) and dp = dy s (1 + p (1 - s)):

    dx[t] = round( sum_j weight[j] dp[t + W - 1 - j] )    dweight[j] = sum_t dp[t] x[t - W + 1 + j]

dweight by `column_sum`.

T = rows of all sequences   B = sequences   F = features   W = taps
"""

import torch
from torch import Tensor

from rlk_kernels.backend import choose, two_backends
from rlk_kernels.custom_op import SECOND, call, custom_op
from rlk_kernels.device import lazy_module
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.numerics.dtypes import wide_dtype
from rlk_kernels.ops.arguments import int32_vector
from rlk_kernels.ops.causal_conv import portable

MOST_TAPS = 8


def causal_conv1d_ref(x: Tensor, weight: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The formula in float64, for tests."""
    taps, parts = weight.shape[1], []
    for begin, end in zip(cu_seqlens.tolist(), cu_seqlens[1:].tolist(), strict=False):
        padded = torch.nn.functional.pad(x[begin:end].double(), (0, 0, taps - 1, 0))
        window = padded.unfold(0, taps, 1) if end > begin else padded.new_zeros(0, x.shape[1], taps)
        parts.append((window * weight.double()).sum(-1))
    return torch.nn.functional.silu(torch.cat(parts))


_module = two_backends(portable, lazy_module("rlk_kernels.ops.causal_conv.kernels"))


@custom_op(
    "causal_conv1d_backward",
    lambda x, weight, cu, dy, backend: (
        x.new_empty(x.shape), weight.new_empty(weight.shape, dtype=wide_dtype(x.dtype))
    ),
    no_gradient=("causal_conv1d", SECOND),
)  # fmt: skip
def _causal_conv1d_backward(
    x: Tensor, weight: Tensor, cu: Tensor, dy: Tensor, backend: str
) -> tuple[Tensor, Tensor]:
    return _module("causal_conv1d_backward", backend).backward(x, weight, cu, dy)


@custom_op(
    "causal_conv1d", lambda x, *rest: x.new_empty(x.shape), gradients=(3, _causal_conv1d_backward)
)
def _causal_conv1d(x: Tensor, weight: Tensor, cu: Tensor, backend: str) -> Tensor:
    return _module("causal_conv1d", backend).forward(x, weight, cu)


@custom_op("cached_causal_conv1d", lambda cache, x, *rest: x.new_empty(x.shape), writes=("cache",))
def _cached_causal_conv1d(
    cache: Tensor, x: Tensor, weight: Tensor, slots: Tensor, context: Tensor, cu: Tensor,
    backend: str,
) -> Tensor:  # fmt: skip
    return _module("cached_causal_conv1d", backend).cached(cache, x, weight, slots, context, cu)


def _check(op: str, x: Tensor, weight: Tensor) -> None:
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[0] != x.shape[1]:
        raise UnsupportedShape(
            f"{op}: x[T, F] and weight[F, W] are needed, not {tuple(x.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if not 1 < weight.shape[1] <= MOST_TAPS:
        raise UnsupportedShape(f"{op}: {weight.shape[1]} taps are not in 2..{MOST_TAPS}")
    if x.dtype != weight.dtype or not x.is_floating_point():
        raise UnsupportedDtype(
            f"{op}: x is {x.dtype} and weight {weight.dtype}; one floating dtype is needed"
        )


def causal_conv1d(
    x: Tensor, weight: Tensor, cu_seqlens: Tensor, *, backend: str | None = None
) -> Tensor:
    """y[T, F] of x[T, F] of whole sequences and weight[F, W], 2 <= W <= 8.

    x, weight: bfloat16, float16, float32 (float64 on the torch backend). cu_seqlens[B + 1]: the
    begins of the sequences. Differentiable in x and weight. cu_seqlens beyond T raise on the torch
    backend and are not checked on a GPU. Rows outside every sequence are undefined on a GPU and 0
    on the torch backend. Raises UnsupportedShape, UnsupportedDtype, and what `backend.choose`
    raises.
    """
    op = "causal_conv1d"
    _check(op, x, weight)
    cu = int32_vector(op, "cu_seqlens", cu_seqlens)
    chosen = choose(op, backend, x, weight, cu)
    return call(_causal_conv1d, x.contiguous(), weight.contiguous(), cu, chosen)


def cached_causal_conv1d(
    x: Tensor, weight: Tensor, cache: Tensor, slots: Tensor, context_lens: Tensor,
    cu_seqlens: Tensor, *, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """`causal_conv1d` of rows that continue sequences, with the bits of the whole sequences.

    cache[N, W - 1, F] in x's dtype, with any strides: the raw rows before the next row of the
    sequence at slots[B]; it is written. context_lens[B]: the tokens of each sequence before its new
    rows; with 0 a sequence begins, whatever is in its slot. No two sequences may share a slot. A
    slot outside of the cache raises IndexError on the torch backend; on a GPU its rows are
    undefined and nothing is written. There is no gradient. Raises UnsupportedShape,
    UnsupportedDtype, ValueError, and what `backend.choose` raises.
    """
    op = "cached_causal_conv1d"
    _check(op, x, weight)
    features, taps = weight.shape
    if cache.dim() != 3 or cache.shape[1:] != (taps - 1, features):
        raise UnsupportedShape(
            f"{op}: cache[N, {taps - 1}, {features}] is needed, not {tuple(cache.shape)}"
        )
    if cache.dtype != x.dtype:
        raise UnsupportedDtype(f"{op}: cache is {cache.dtype}; {x.dtype} is needed")
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        raise ValueError(f"{op}: it has no gradient; use causal_conv1d, or torch.no_grad()")
    cu = int32_vector(op, "cu_seqlens", cu_seqlens)
    slots = int32_vector(op, "slots", slots, cu.numel() - 1)
    context = int32_vector(op, "context_lens", context_lens, cu.numel() - 1)
    chosen = choose(op, backend, x, weight, cache, slots, context, cu)
    return call(
        _cached_causal_conv1d,
        cache,
        x.contiguous(),
        weight.contiguous(),
        slots,
        context,
        cu,
        chosen,
    )
