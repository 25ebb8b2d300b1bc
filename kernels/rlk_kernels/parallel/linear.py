"""linear with its weight divided among ranks: y = x @ weight^T + bias, with the bits of one rank.

Column-parallel: a rank has some rows of weight[N, K], and computes the same columns of y.
Row-parallel: a rank has some columns of the weight and of x. It gathers x, multiplies by some whole
rows of the weight, and y is gathered: no partial sums are added up.
With sequence parallelism, the tensors that all ranks would have whole (x of a column-parallel, y of
a row-parallel product) are divided along the first dimension.

The weight keeps the trainer's sharding, and ranks exchange it for the other one in each forward. A
copy could become stale, because an optimizer that writes through `.data` or through a buffer under
the parameter does not change a version counter.

Gradients, each a whole sum in the order of `ops/linear.py`:
    row-parallel     dx of this rank's columns, dweight: local, because all ranks have the same dy
    column-parallel  dweight, dbias: local
                     dx = dy @ weight sums over N, which ranks share: a row-parallel product again

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
        # This rank's rows of a sequence are saved and gathered again, as in megatron-core.
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
"""The rows of dy that are gathered at a time, which bounds the memory if dy belongs to logits."""


def _shared_input_grad(ctx: Any, dy: Tensor, weight: Tensor) -> Tensor:
    """dx[..., K], or this rank's rows of dx, from this rank's columns of dy."""
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
    """y[..., N] for this rank's x[..., K / R] and weight[N, K / R]; bias[N] is whole. With
    sequence: y[S / R, ..., N], this rank's rows, for x[S, ..., K / R].

    Call this on all ranks of the group; None is one rank. Raises UnsupportedShape if R ranks do not
    divide N, or S.
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
    """y[..., N / R], this rank's columns, for x[..., K], weight[N / R, K] and bias[N / R]. With
    sequence, x is this rank's x[S / R, ..., K]. blocks: the number of operators that are fused in
    weight, each divided among all ranks, like gate and up; it decides the order of the gradients'
    sums.

    Call this on all ranks of the group; None is one rank. Raises UnsupportedShape if R ranks do not
    divide K.
    """
    if size_of(group) == 1:
        return linear(x, weight, bias, out_dtype=out_dtype, backend=backend)
    check_divides("in features", weight.shape[1], group)
    chosen = choose("linear", backend, x, weight, bias)
    return _ColumnParallel.apply(x, weight, bias, group, sequence, blocks, out_dtype, chosen)


def check_divides(what: str, size: int, group: Group) -> None:
    """Raises UnsupportedShape if the ranks do not divide `size`."""
    if size % size_of(group):
        raise UnsupportedShape(f"{size} {what} cannot be divided among {size_of(group)} ranks")
