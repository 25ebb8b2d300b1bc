"""`embedding` in PyTorch."""

import torch
from torch import Tensor

from rlk_kernels.numerics.dtypes import wide_dtype


def forward(ids: Tensor, weight: Tensor) -> Tensor:
    """The rows ids[T] of weight[V, H]; raises IndexError for ids outside."""
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= weight.shape[0]):
        raise IndexError(
            f"embedding: ids from {int(ids.min())} to {int(ids.max())} are not all in "
            f"0..{weight.shape[0] - 1}, the rows of weight"
        )
    return weight.index_select(0, ids)


def backward(ids: Tensor, dy: Tensor, rows: int) -> Tensor:
    """dweight[rows, H]; the tokens of an id are added in pairs, pairs of pairs, and so on."""
    wide = wide_dtype(dy.dtype)
    key, order = torch.sort(ids, stable=True)
    value = dy[order].to(wide)
    while key.numel():
        # rank: the index of a row among the rows of its id; rows 2i and 2i + 1 are added
        start = torch.searchsorted(key, key)
        rank = torch.arange(key.numel(), device=key.device) - start
        odd = rank % 2 == 1
        if not bool(odd.any()):
            break
        position = odd.nonzero().squeeze(1)
        value[position - 1] += value[position]
        key, value = key[~odd], value[~odd]
    grad = dy.new_zeros(rows, dy.shape[1])
    grad[key] = value.to(dy.dtype)
    return grad
