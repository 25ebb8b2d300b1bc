"""The dtype of sums and of intermediate results."""

import torch


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for float64, which the torch backend takes for gradcheck."""
    return torch.float64 if dtype == torch.float64 else torch.float32
