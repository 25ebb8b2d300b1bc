"""Rounding to few bits and back."""

import torch


def through_fp8(x: torch.Tensor) -> torch.Tensor:
    """float32 after fp8 (e4m3), the last dimension scaled so that its largest entry is 448."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448.0
    return (x.float() / scale).to(torch.float8_e4m3fn).float() * scale


def through_int8(x: torch.Tensor) -> torch.Tensor:
    """float32 after int8, the last dimension scaled so that its largest entry is 127."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127.0
    return (x.float() / scale).round().clamp(-127, 127) * scale


def to_tf32(x: torch.Tensor) -> torch.Tensor:
    """float32 with 10 bits of mantissa, to nearest."""
    bits = x.float().contiguous().view(torch.int32)
    return ((bits + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)
