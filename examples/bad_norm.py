"""A bug to find: the first norm of a Megatron model has an epsilon that differs from config.json.

rlk-align compare --train megatron:patch=examples.bad_norm:install
"""

from types import MethodType
from typing import Any

import torch


def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    """RMSNorm whose epsilon is too large by 1e-3."""
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-4 + 1e-3)
    return (x.float() * scale * self.weight).to(x.dtype)


def install(model: Any) -> None:
    """Replaces the forward of the first layer's first norm."""
    first = model.decoder.layers[0].input_layernorm
    first.forward = MethodType(norm, first)
