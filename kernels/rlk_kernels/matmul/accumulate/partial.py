"""What a call of `accumulate` is given: a slice of the contracted dimension of one product."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialProduct:
    """One slice of K: out[M, N] (contiguous) goes on from where the slice before it stopped."""

    a: Tensor
    b: Tensor
    out: Tensor
    lo: Tensor
    """`lo_accumulator` of out."""
    trans_a: bool
    first: bool
    last: bool
    scale: Tensor | None = None
    """[M], only with the last slice: a row's sums times a number, before they are rounded."""
    rows: int = 0
    """Rows of the tensor that contains out's rows, where another slice may divide them differently;
    0: M."""


def lo_accumulator(out: Tensor, calls: int) -> Tensor:
    """The lower halves of out's accumulators, where several calls need them."""
    shape = out.shape if calls > 1 and out.dtype != torch.float32 else (0,)
    return torch.empty(shape, dtype=torch.int16, device=out.device)
