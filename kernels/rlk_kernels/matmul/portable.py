"""The product in PyTorch by error-free splitting: no order of summation can change its bits."""

import torch
from torch import Tensor

from rlk_kernels.numerics.dtypes import wide_dtype
from rlk_kernels.numerics.error_free import matmul_nt

PORTABLE_BLOCK = 16384
"""Columns of B in float64 at a time: it bounds memory and changes no bit."""


def product(
    a: Tensor, b: Tensor, bias: Tensor | None, trans_a: bool, trans_b: bool, dtype: torch.dtype
) -> Tensor:
    """A @ B (+ bias) by error-free splitting, rounded to float32 and then to `dtype`."""
    a = a.mT if trans_a else a
    b = b if trans_b else b.mT
    wide = wide_dtype(a.dtype)
    out = torch.empty(a.shape[0], b.shape[0], dtype=dtype, device=a.device)
    for start in range(0, b.shape[0], PORTABLE_BLOCK):
        stop = min(start + PORTABLE_BLOCK, b.shape[0])
        block = matmul_nt(a, b[start:stop])
        if bias is not None:
            block += bias[start:stop].double()
        out[:, start:stop] = block.to(wide).to(dtype)
    return out
