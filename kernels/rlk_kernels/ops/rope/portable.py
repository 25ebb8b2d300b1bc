"""`rope` in PyTorch."""

import torch
from torch import Tensor

from rlk_kernels.numerics.dtypes import wide_dtype
from rlk_kernels.numerics.elementary import sin_cos


def rotate(
    x: Tensor, positions: Tensor, frequency: Tensor, scaling: Tensor | None, sign: float,
    round_to: torch.dtype, interleaved: bool,
) -> Tensor:  # fmt: skip
    """Rotate x[T, H, D] by sign times its angles."""
    wide = wide_dtype(x.dtype)
    r = frequency.numel()
    angle = positions.to(torch.float32)[:, None] * frequency
    table = [v.to(torch.float32) for v in sin_cos(angle)]
    if scaling is not None:
        table = [v * scaling for v in table]
    sin, cos = (v.to(round_to).to(wide)[:, None, :] for v in table)
    sin = sin * sign
    y = x.clone(memory_format=torch.contiguous_format)
    first = slice(0, 2 * r, 2) if interleaved else slice(0, r)
    second = slice(1, 2 * r, 2) if interleaved else slice(r, 2 * r)
    a, b = x[..., first].to(wide), x[..., second].to(wide)
    y[..., first] = (a * cos - b * sin).to(x.dtype)
    y[..., second] = (b * cos + a * sin).to(x.dtype)
    return y
