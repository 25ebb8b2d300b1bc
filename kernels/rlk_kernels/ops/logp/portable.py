"""`logp` in PyTorch: the tree of `lse_tree` in float64."""

import torch
from torch import Tensor

from rlk_kernels.numerics import elementary
from rlk_kernels.numerics.lse_tree.portable import block_portable
from rlk_kernels.numerics.rows import by_rows


def inverse_of(temperature: float, dtype: torch.dtype) -> float:
    """1 / temperature, rounded to `dtype`."""
    return float(torch.tensor(1.0 / temperature, dtype=dtype))


def _forward(logits, target, temperature):
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    z = (logits.to(wide) * inverse_of(temperature, wide)).double()
    m, s = block_portable(z)
    log_s = elementary.log(s)
    chosen = z.gather(-1, target.long().clamp(min=0)[:, None]).squeeze(-1)
    logp = torch.where(target < 0, 0.0, (chosen - m) - log_s)
    return logp.to(wide), m, log_s


def _backward(logits, target, m, log_s, g, temperature):
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    z = (logits.to(wide) * inverse_of(temperature, wide)).double()
    p = elementary.exp((z - m[:, None]) - log_s[:, None])
    one = torch.zeros_like(p).scatter_(1, target.long().clamp(min=0)[:, None], 1.0)
    dx = (g.double() * inverse_of(temperature, wide))[:, None] * (one - p)
    quiet = (target < 0)[:, None] | ((g == 0)[:, None] & dx.isnan())
    return torch.where(quiet, 0.0, dx).to(wide).to(logits.dtype)


def forward(logits: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """(logp, m, log s)[T]: m is the maximum of a row, log s natural."""
    v = logits.shape[1]
    if target.numel() and int(target.max()) >= v:
        raise IndexError(f"logp: a target of {int(target.max())} is not below V = {v}")
    return by_rows(lambda x, own: _forward(x, own, temperature), logits, target)


def backward(
    logits: Tensor, target: Tensor, m: Tensor, log_s: Tensor, g: Tensor, temperature: float
) -> Tensor:
    """dlogits[T, V]."""
    return by_rows(
        lambda x, own, m, log_s, g: _backward(x, own, m, log_s, g, temperature),
        logits, target, m, log_s, g,
    )  # fmt: skip
