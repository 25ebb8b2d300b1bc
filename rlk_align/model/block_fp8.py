"""Weights in blocks of fp8: the numbers that they stand for. The formula is that of
`rlk_kernels.block_fp8`, which the tool does not import; a test holds the two equal."""

import torch

MAX = 448.0
"""The largest number of e4m3."""


def dequantise(values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """float32 [N, K] of e4m3 values [N, K] and the scales [ceil(N / R), ceil(K / C)] of blocks of
    R x C: each product rounded once."""
    return values.float() * spread(scales.float(), values.shape, block)


def spread(
    scales: torch.Tensor, shape: torch.Size | tuple[int, ...], block: tuple[int, int]
) -> torch.Tensor:
    """The scale of each entry, [N, K]."""
    rows, columns = shape
    return scales.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]


def largest(w: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The largest magnitude of each block of a weight [N, K]: [ceil(N / R), ceil(K / C)]."""
    rows, columns = (-(-n // b) for n, b in zip(w.shape, block, strict=True))
    padded = w.new_zeros(rows * block[0], columns * block[1])
    padded[: w.shape[0], : w.shape[1]] = w.abs()
    return padded.view(rows, block[0], columns, block[1]).amax((1, 3))


def rounded(scaled: torch.Tensor) -> torch.Tensor:
    """e4m3 of numbers that were divided by their scales; beyond the range, the largest."""
    return scaled.clamp(-MAX, MAX).to(torch.float8_e4m3fn)


def raised(scales: torch.Tensor) -> torch.Tensor:
    """float32 scales, rounded up to powers of two."""
    mantissa, exponent = torch.frexp(scales)
    up = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.ldexp(torch.ones_like(scales), up)


def in_cache(x: torch.Tensor, scale: float, cuts: bool = False) -> torch.Tensor:
    """Keys or values as a cache of e4m3 gives them back, in their dtype: e4m3(x / scale) · scale.
    `cuts`: as vLLM 0.32 on CPUs, which cuts them off toward zero."""
    scaled = x.float() / scale
    values = rounded(scaled)
    if cuts:
        beyond = values.float().abs() > scaled.abs()
        values = (values.view(torch.uint8) - beyond.to(torch.uint8)).view(torch.float8_e4m3fn)
    return (values.double() * scale).to(x.dtype)
