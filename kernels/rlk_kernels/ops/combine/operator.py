"""combine_experts: the weighted sum of the rows of a token's experts.

    y[t, h] = round( sum_j weights[t, j] * rows[t, j, h] )         fp32 arithmetic, one rounding

Order: one by one in ascending j, from +0. Each product is rounded to fp32 before it is added (no
multiply-add), so all backends give the same bits. A slot whose id is outside of 0 .. E - 1 is
dropped: a NaN in its row or its weight has no effect.

Gradients:
    drows[t, j, h] = round( weights[t, j] * dy[t, h] )          0 for a dropped slot
    dweights[t, j] = sum_h dy[t, h] * rows[t, j, h]             fp32, an order of the row alone

T = tokens   k = experts of a token   E = experts   H = features
"""

import torch
from torch import Tensor

from rlk_kernels.backend import choose, two_backends
from rlk_kernels.custom_op import SECOND, call, custom_op
from rlk_kernels.device import lazy_module
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.numerics.dtypes import wide_dtype
from rlk_kernels.ops.combine import portable

_module = two_backends(portable, lazy_module("rlk_kernels.ops.combine.kernels"))


def combine_experts_ref(rows: Tensor, weights: Tensor) -> Tensor:
    """The formula in float64, for tests."""
    return (rows.double() * weights.double()[..., None]).sum(1)


@custom_op(
    "combine_experts_backward",
    lambda rows, weights, *rest: (rows.new_empty(rows.shape), weights.new_empty(weights.shape)),
    no_gradient=("combine_experts", SECOND),
)
def _combine_backward(
    rows: Tensor, weights: Tensor, ids: Tensor, dy: Tensor, experts: int, backend: str
) -> tuple[Tensor, Tensor]:
    module = _module("combine_experts_backward", backend)
    return module.backward(dy, rows, weights, ids, experts)


def _fake(rows, *rest):
    return rows.new_empty(rows.shape[0], rows.shape[2])


@custom_op("sum_slots", _fake, no_gradient=("grouped_linear", SECOND))
def sum_slots(rows: Tensor, backend: str) -> Tensor:
    """[T, H]: the sum of rows[T, k, H] in fp32 in ascending k, rounded once."""
    return _module("sum_slots", backend).forward(rows, None, None, 0)


@custom_op("combine_experts", _fake, gradients=(3, _combine_backward))
def _combine(rows: Tensor, weights: Tensor, ids: Tensor, experts: int, backend: str) -> Tensor:
    return _module("combine_experts", backend).forward(rows, weights, ids, experts)


def combine_experts(
    rows: Tensor, weights: Tensor, ids: Tensor, experts: int, *, backend: str | None = None
) -> Tensor:
    """y[T, H] of rows[T, k, H], weights[T, k] and ids int32 [T, k], which ascend in each row.

    rows: bfloat16, float16, float32 (float64 on the torch backend); weights: float32 (float64 for
    float64 rows). Raises UnsupportedShape, UnsupportedDtype, and what `backend.choose` raises.
    """
    if rows.dim() != 3 or weights.shape != rows.shape[:2] or ids.shape != rows.shape[:2]:
        raise UnsupportedShape(
            f"combine_experts: rows {tuple(rows.shape)}, weights {tuple(weights.shape)} and ids "
            f"{tuple(ids.shape)}; rows[T, k, H], weights[T, k] and ids[T, k] are needed"
        )
    chosen = choose("combine_experts", backend, rows, weights, ids)
    wide = wide_dtype(rows.dtype)
    if weights.dtype != wide or ids.dtype != torch.int32:
        raise UnsupportedDtype(
            f"combine_experts: rows are {rows.dtype}, weights {weights.dtype}, ids {ids.dtype}; "
            f"weights in {wide} and ids in int32 are needed"
        )
    parts = (x.contiguous() for x in (rows, weights, ids))
    return call(_combine, *parts, experts, chosen)
