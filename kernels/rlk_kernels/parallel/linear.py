"""linear with its weight divided among ranks: y = x @ weight^T + bias, with the bits of one rank.

Column-parallel: a rank has some rows of weight[N, K], and computes those columns of y.
Row-parallel: a rank has some columns of the weight, and those of x. It gathers x, multiplies by its
share of the weight's rows over the whole K, and y is gathered: no partial sums are added.
Under sequence parallelism, what all ranks would hold whole (the x of the one, the y of the other)
is cut along the first dimension.

The weight stays as the trainer keeps it, and its other sharding is exchanged in each forward: a
kept copy could become stale, because an optimizer that writes through `.data` or through a buffer
under the parameter does not change a version counter.

Gradients, each a whole sum in the order that `ops/linear.py` says:
    row-parallel     dx of own columns, dweight: local, because dy is the same on all ranks
    column-parallel  dweight, dbias: local
                     dx = dy @ weight sums over N, which is shared: a row-parallel product again

M = rows of x   K = in features   N = out features   R = ranks
"""

from typing import Any

import torch
from torch import Tensor

from rlk_kernels.backend import choose
from rlk_kernels.custom_op import on_device_of
from rlk_kernels.errors import UnsupportedShape
from rlk_kernels.ops.linear import bias_grad, input_grad, linear, weight_grad
from rlk_kernels.parallel.copies import (
    Group,
    columns_to_rows,
    gather_columns,
    gather_rows,
    own_rows,
    rows_to_columns,
    size_of,
)


class _RowParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group,
        sequence: bool, backend: str,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.group, ctx.sequence, ctx.backend = group, sequence, backend
        whole = columns_to_rows(weight, group)
        own_bias = None if bias is None else own_rows(bias, group)
        y = linear(gather_columns(x, group), whole, own_bias, backend=backend)
        return columns_to_rows(y, group) if sequence else gather_columns(y, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dy = gather_rows(dy, ctx.group) if ctx.sequence else dy
        dy = dy.to(x.dtype).reshape(-1, dy.shape[-1])
        dx = dw = db = None
        with on_device_of(x):
            if ctx.needs_input_grad[0]:
                dx = input_grad(dy, weight, ctx.backend).view(x.shape)
            if ctx.needs_input_grad[1]:
                dw = weight_grad(dy, x.reshape(-1, x.shape[-1]), weight.dtype, ctx.backend)
            if ctx.needs_input_grad[2]:
                db = bias_grad(dy, ctx.bias_dtype, ctx.backend)
        return dx, dw, db, None, None, None


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group,
        sequence: bool, blocks: int, out_dtype: torch.dtype | None, backend: str,
    ) -> Tensor:  # fmt: skip
        # Of a sequence the own share is kept, and gathered again: as megatron-core does it.
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.group, ctx.sequence, ctx.blocks, ctx.backend = group, sequence, blocks, backend
        x = gather_rows(x, group) if sequence else x
        return linear(x, weight, bias, out_dtype=out_dtype, backend=backend)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dy = dy.to(x.dtype)
        rows = dy.reshape(-1, dy.shape[-1])
        dx = dw = db = None
        with on_device_of(x):
            if ctx.needs_input_grad[0]:
                dx = _shared_input_grad(ctx, dy, weight)
            if ctx.needs_input_grad[1]:
                x = gather_rows(x, ctx.group) if ctx.sequence else x
                dw = weight_grad(rows, x.reshape(-1, x.shape[-1]), weight.dtype, ctx.backend)
            if ctx.needs_input_grad[2]:
                db = bias_grad(rows, ctx.bias_dtype, ctx.backend)
        return dx, dw, db, None, None, None, None, None


ROWS = 1024
"""Rows of dy that are gathered at a time: bounds the memory where it is that of logits."""


def _shared_input_grad(ctx: Any, dy: Tensor, weight: Tensor) -> Tensor:
    """dx[..., K], or this rank's rows of it, of own columns of dy."""
    columns = rows_to_columns(weight, ctx.group, ctx.blocks)
    parts = [
        input_grad(gather_columns(some, ctx.group, ctx.blocks), columns, ctx.backend)
        for some in dy.reshape(-1, dy.shape[-1]).split(ROWS)
    ]
    dx = torch.cat(parts).view(*dy.shape[:-1], columns.shape[-1])
    return columns_to_rows(dx, ctx.group) if ctx.sequence else gather_columns(dx, ctx.group)


def row_parallel(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, *,
    sequence: bool = False, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """y[..., N] of this rank's x[..., K / R] and weight[N, K / R]; bias[N] is whole. `sequence`:
    y[S / R, ..., N], this rank's rows, of x[S, ..., K / R].

    Call it on all ranks of the group; None is one rank. Raises UnsupportedShape where R ranks do
    not divide N, or S.
    """
    if size_of(group) == 1:
        return linear(x, weight, bias, backend=backend)
    check_divides("out features", weight.shape[0], group)
    if sequence:
        check_divides("rows of a sequence", x.shape[0], group)
    chosen = choose("linear", backend, x, weight, bias)
    return _RowParallel.apply(x, weight, bias, group, sequence, chosen)


def column_parallel(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, *,
    sequence: bool = False, blocks: int = 1, out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:  # fmt: skip
    """y[..., N / R], this rank's columns, of x[..., K], weight[N / R, K] and bias[N / R].
    `sequence`: of this rank's x[S / R, ..., K]. `blocks`: how many operators are fused in weight,
    each divided among all ranks, as gate and up are; it decides the order of the gradients' sums.

    Call it on all ranks of the group; None is one rank. Raises UnsupportedShape where R ranks do
    not divide K.
    """
    if size_of(group) == 1:
        return linear(x, weight, bias, out_dtype=out_dtype, backend=backend)
    check_divides("in features", weight.shape[1], group)
    chosen = choose("linear", backend, x, weight, bias)
    return _ColumnParallel.apply(x, weight, bias, group, sequence, blocks, out_dtype, chosen)


def check_divides(what: str, size: int, group: Group) -> None:
    """Raises UnsupportedShape where the ranks do not divide `size`."""
    if size % size_of(group):
        raise UnsupportedShape(f"{size} {what} cannot be divided among {size_of(group)} ranks")
