"""Rows of bf16 numbers, and the rounding of exact ones to bf16."""

import torch

BF16 = torch.bfloat16


def rand(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
    return made.to(BF16)


def once(exact: torch.Tensor) -> torch.Tensor:
    """Rounded by way of fp32, as the kernels do."""
    return exact.float().to(BF16)
