"""`linear_sample` in PyTorch: the product and `sample` of a few rows at a time."""

import torch
from torch import Tensor

from rlk_kernels.matmul.portable import product
from rlk_kernels.ops.sample import portable

LOGITS = 1 << 23
"""The most logits in memory at a time (memory only), or those of one row."""


def linear_sample(
    h: Tensor, w: Tensor, bias: Tensor | None, keys: Tensor, positions: Tensor,
    temperature: Tensor, dtype: torch.dtype, raw: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(ids, logprobs, kept, mass, raw logprobs)."""
    step = max(1, LOGITS // w.shape[0])
    parts = []
    for first in range(0, max(1, h.shape[0]), step):
        part = slice(first, first + step)
        logits = product(h[part], w, bias, False, True, dtype)
        rows = logits, keys[part], positions[part], temperature[part]
        parts.append(portable.sample(*rows, None, None, None, raw, "linear_sample", first))
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))
