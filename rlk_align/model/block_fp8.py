"""Weights in blocks of fp8: the numbers that they stand for. The formula is that of
`rlk_kernels.block_fp8`, which the tool does not import; a test holds the two equal."""

import torch


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
