"""Weights in blocks of fp8 (e4m3) with one float32 scale each, as DeepSeek's and Qwen's checkpoints
store them, by one quantiser for a trainer and a rollout engine.

    s = max(|w| in the block, 1e-12) / 448        float32; with powers_of_two rounded up to 2^n
    q = e4m3(w / s)                               rounded to nearest, ties to even
    w' = round(float32(q · s))                    to the dtype of the weight

A weight is [N, K] and has ceil(N / R) x ceil(K / C) blocks of R x C entries; the last blocks may be
smaller. Each entry depends on its own block alone, and each step is one rounding of IEEE 754, so
every device gives the same bits.
"""

from typing import Any

import torch
from torch import Tensor

from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape

E4M3 = torch.float8_e4m3fn
MAX = 448.0
"""The largest e4m3 number."""
SMALLEST = 1e-12
"""The least largest magnitude of a block, so that the scale of a block of zeros is not 0."""
BLOCK = (128, 128)
"""The rows and the columns of a block in the checkpoints of DeepSeek and Qwen."""


def quantise(
    weight: Tensor, block: tuple[int, int] = BLOCK, powers_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """(q, s) of a weight [N, K] in float32, bfloat16 or float16: e4m3 [N, K], and float32
    [ceil(N / R), ceil(K / C)] with blocks of R x C.

    Raises UnsupportedShape or UnsupportedDtype.
    """
    _check(weight, block)
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise UnsupportedDtype(f"a weight of {weight.dtype} is not quantised")
    w = weight.detach().float()
    scale = _largest(w, block).clamp(min=SMALLEST) / MAX
    if powers_of_two:
        mantissa, exponent = torch.frexp(scale)
        up = torch.where(mantissa == 0.5, exponent - 1, exponent)
        scale = torch.ldexp(torch.ones_like(scale), up)
    return (w / spread(scale, w.shape, block)).clamp(-MAX, MAX).to(E4M3), scale


def dequantise(
    values: Tensor,
    scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    block: tuple[int, int] = BLOCK,
) -> Tensor:
    """The weight [N, K] in a dtype, of e4m3 values [N, K] and scales [ceil(N / R), ceil(K / C)].

    Raises UnsupportedShape or UnsupportedDtype.
    """
    _check(values, block)
    if values.dtype != E4M3:
        raise UnsupportedDtype(f"values of {values.dtype} are not e4m3")
    wanted = grid(values.shape, block)
    if tuple(scale.shape) != wanted:
        raise UnsupportedShape(
            f"scales {list(scale.shape)} of a weight {list(values.shape)} in blocks of "
            f"{block[0]} x {block[1]}, which has {list(wanted)}"
        )
    return (values.float() * spread(scale.float(), values.shape, block)).to(dtype)


def fake_quantise(
    weight: Tensor, block: tuple[int, int] = BLOCK, powers_of_two: bool = False
) -> Tensor:
    """The weight [N, K] that `quantise` and `dequantise` give, in the dtype of `weight`: what a
    rollout engine computes with that dequantises. The gradient is passed straight through: that of
    `weight` is the gradient of the result.

    Raises UnsupportedShape or UnsupportedDtype.
    """
    return _FakeQuantise.apply(weight, block, powers_of_two)


class _FakeQuantise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, block: tuple[int, int], powers_of_two: bool) -> Tensor:
        return dequantise(*quantise(weight, block, powers_of_two), weight.dtype, block)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


def grid(shape: torch.Size | tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """The number of blocks of a weight [N, K] along both dimensions."""
    rows, columns = shape
    return -(-rows // block[0]), -(-columns // block[1])


def spread(scale: Tensor, shape: torch.Size | tuple[int, ...], block: tuple[int, int]) -> Tensor:
    """The scale of each entry, [N, K]."""
    rows, columns = shape
    wide = scale.repeat_interleave(block[0], 0)[:rows]
    return wide.repeat_interleave(block[1], 1)[:, :columns]


def _largest(w: Tensor, block: tuple[int, int]) -> Tensor:
    """The largest magnitude of each block; NaN in a block with one."""
    rows, columns = grid(w.shape, block)
    padded = w.new_zeros(rows * block[0], columns * block[1])
    padded[: w.shape[0], : w.shape[1]] = w.abs()
    return padded.view(rows, block[0], columns, block[1]).amax((1, 3))


def _check(weight: Tensor, block: tuple[int, int]) -> None:
    if weight.dim() != 2 or not weight.numel() or min(block) < 1:
        raise UnsupportedShape(
            f"a weight {list(weight.shape)} in blocks of {block[0]} x {block[1]}: a matrix in "
            "blocks of one entry or more is needed"
        )
