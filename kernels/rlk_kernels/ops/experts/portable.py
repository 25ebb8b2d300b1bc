"""`grouped_linear` in PyTorch: the portable product, expert by expert."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from rlk_kernels.matmul.portable import product
from rlk_kernels.numerics.column_sum.operator import column_sum


def group(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """(order, offsets) of `ExpertGroups`."""
    flat = ids.flatten()
    key = torch.where((flat >= 0) & (flat < experts), flat, experts)
    key, order = key.sort(stable=True)
    bounds = torch.arange(experts + 1, dtype=key.dtype, device=key.device)
    return order.int(), torch.searchsorted(key, bounds).int()


def _experts(order: Tensor, offsets: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(expert, its rows) of every expert with rows."""
    rows = order.long()
    bounds = offsets.tolist()
    for e, (begin, end) in enumerate(itertools.pairwise(bounds)):
        if begin < end:
            yield e, rows[begin:end]


def forward(
    x: Tensor, weight: Tensor, order: Tensor, offsets: Tensor, each: int, bias: Tensor | None = None
) -> Tensor:
    """y[S, N]."""
    y = x.new_zeros(order.shape[0], weight.shape[1])
    for e, rows in _experts(order, offsets):
        y[rows] = product(
            x[rows // each], weight[e], None if bias is None else bias[e], False, True, x.dtype
        )
    return y


def input_grad(dy: Tensor, weight: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
    """dx[S, K]."""
    dx = dy.new_zeros(order.shape[0], weight.shape[2])
    for e, rows in _experts(order, offsets):
        dx[rows] = product(dy[rows], weight[e], None, False, False, dy.dtype)
    return dx


def weight_grad(dy: Tensor, x: Tensor, order: Tensor, offsets: Tensor, each: int) -> Tensor:
    """dweight[E, N, K]."""
    dw = dy.new_zeros(offsets.shape[0] - 1, dy.shape[1], x.shape[1])
    for e, rows in _experts(order, offsets):
        dw[e] = product(dy[rows], x[rows // each], None, True, False, dy.dtype)
    return dw


def bias_grad(dy: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
    """dbias[E, N]."""
    db = dy.new_zeros(offsets.shape[0] - 1, dy.shape[1])
    for e, rows in _experts(order, offsets):
        db[e] = column_sum(dy[rows], "torch")
    return db
