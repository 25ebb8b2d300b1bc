"""combine_experts: the rows of a token's experts, added up by their weights.

    y[t, h] = round( sum_j weights[t, j] * rows[t, j, h] )         fp32 arithmetic, one rounding

Order: one by one in ascending j, from +0; each product is rounded to fp32 before it is added (no
multiply-add), on every backend alike: its bits are the same on all of them. A slot whose id is
outside of 0 .. E - 1 is dropped: a NaN in its row or its weight has no effect.

Gradients:
    drows[t, j, h] = round( weights[t, j] * dy[t, h] )          0 for a dropped slot
    dweights[t, j] = sum_h dy[t, h] * rows[t, j, h]             fp32, an order of the row alone

T = tokens   k = experts of a token   E = experts   H = features
"""

import torch
from torch import Tensor

from rlk_kernels.backend import call, choose, record, refuse_gradient
from rlk_kernels.device import lazy_module
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.ops.combine import portable

_on_triton = lazy_module("rlk_kernels.ops.combine.kernels")


def combine_experts_ref(rows: Tensor, weights: Tensor) -> Tensor:
    """The formula in float64, for tests."""
    return (rows.double() * weights.double()[..., None]).sum(1)


@torch.library.custom_op("rlk::combine_experts", mutates_args=())
def _combine(rows: Tensor, weights: Tensor, ids: Tensor, experts: int, backend: str) -> Tensor:
    record("combine_experts", backend)
    if backend == "torch":
        return portable.forward(rows, weights, ids, experts)
    return _on_triton().forward(rows, weights, ids, experts)


@_combine.register_fake
def _(rows, weights, ids, experts, backend):
    return rows.new_empty(rows.shape[0], rows.shape[2])


@torch.library.custom_op("rlk::combine_experts_backward", mutates_args=())
def _combine_backward(
    dy: Tensor, rows: Tensor, weights: Tensor, ids: Tensor, experts: int, backend: str
) -> tuple[Tensor, Tensor]:
    record("combine_experts_backward", backend)
    if backend == "torch":
        return portable.backward(dy, rows, weights, ids, experts)
    return _on_triton().backward(dy, rows, weights, ids, experts)


@_combine_backward.register_fake
def _(dy, rows, weights, ids, experts, backend):
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape)


@torch.library.custom_op("rlk::sum_slots", mutates_args=())
def sum_slots(rows: Tensor, backend: str) -> Tensor:
    """[T, H]: rows[T, k, H] added up in fp32 in ascending k, rounded once."""
    record("sum_slots", backend)
    if backend == "torch":
        return portable.forward(rows, None, None, 0)
    return _on_triton().forward(rows, None, None, 0)


@sum_slots.register_fake
def _(rows, backend):
    return rows.new_empty(rows.shape[0], rows.shape[2])


refuse_gradient(_combine_backward, "combine_experts")
refuse_gradient(sum_slots, "grouped_linear")


def _setup(ctx, inputs, output):
    rows, weights, ids, ctx.experts, ctx.backend = inputs
    ctx.save_for_backward(rows, weights, ids)


def _backward(ctx, dy):
    rows, weights, ids = ctx.saved_tensors
    drows, dweights = _combine_backward(
        dy.contiguous(), rows, weights, ids, ctx.experts, ctx.backend
    )
    return drows, dweights, None, None, None


_combine.register_autograd(_backward, setup_context=_setup)


def combine_experts(
    rows: Tensor, weights: Tensor, ids: Tensor, experts: int, *, backend: str | None = None
) -> Tensor:
    """y[T, H] of rows[T, k, H], weights[T, k] and ids int32 [T, k], which ascend in each row.

    rows: bfloat16, float16, float32 (float64 on the torch backend); weights: float32 (float64 with
    rows of it). Raises UnsupportedShape, UnsupportedDtype, and what `backend.choose` raises.
    """
    if rows.dim() != 3 or weights.shape != rows.shape[:2] or ids.shape != rows.shape[:2]:
        raise UnsupportedShape(
            f"combine_experts: rows {tuple(rows.shape)}, weights {tuple(weights.shape)} and ids "
            f"{tuple(ids.shape)}; rows[T, k, H], weights[T, k] and ids[T, k] are needed"
        )
    wide = torch.promote_types(rows.dtype, torch.float32)
    if not rows.is_floating_point() or weights.dtype != wide or ids.dtype != torch.int32:
        raise UnsupportedDtype(
            f"combine_experts: rows are {rows.dtype}, weights {weights.dtype}, ids {ids.dtype}; "
            f"weights in {wide} and ids in int32 are needed"
        )
    chosen = choose("combine_experts", backend, rows, weights, ids)
    parts = (x.contiguous() for x in (rows, weights, ids))
    return call(_combine, *parts, experts, chosen)
