"""`logp` in PyTorch: the tree of `lse_tree` in float64."""

import functools

import torch
from torch import Tensor

from rlk_kernels.numerics import elementary
from rlk_kernels.numerics.lse_tree.portable import block_portable
from rlk_kernels.numerics.rows import by_rows


@functools.cache
def inverse_of(temperature: float, dtype: torch.dtype) -> float:
    """1 / temperature, rounded to `dtype`."""
    return float(torch.tensor(1.0 / temperature, dtype=dtype))


def _forward(logits, target, ids, top_k, temperature):
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    z = (logits.to(wide) * inverse_of(temperature, wide)).double()
    m, s = block_portable(z)
    log_s = elementary.log(s)

    def of(ids):
        logp = (z.gather(-1, ids.long().clamp(min=0)) - m[:, None]) - log_s[:, None]
        return torch.where(ids < 0, 0.0, logp).to(wide)

    top = target.new_empty(z.shape[0], 0, dtype=torch.int64)
    given = of(top if ids is None else ids)
    if top_k:
        _, order = torch.sort(logits, dim=-1, descending=True, stable=True)
        top = order[:, :top_k].contiguous()
    return of(target[:, None]).squeeze(-1), m, log_s, given, of(top), top


def _backward(logits, target, m, log_s, g, temperature):
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    z = (logits.to(wide) * inverse_of(temperature, wide)).double()
    p = elementary.exp((z - m[:, None]) - log_s[:, None])
    one = torch.zeros_like(p).scatter_(1, target.long().clamp(min=0)[:, None], 1.0)
    dx = (g.double() * inverse_of(temperature, wide))[:, None] * (one - p)
    quiet = (target < 0)[:, None] | ((g == 0)[:, None] & dx.isnan())
    return torch.where(quiet, 0.0, dx).to(wide).to(logits.dtype)


def forward(
    logits: Tensor, target: Tensor, token_ids: Tensor | None, top_k: int, temperature: float
) -> tuple[Tensor, ...]:
    """(logp, m, log s)[T]: m is the maximum of a row, log s natural; logp of token_ids[T, J], and
    of the top_k, and their ids (empty where there are none)."""
    v = logits.shape[1]
    for ids in (target, token_ids):
        if ids is not None and ids.numel() and int(ids.max()) >= v:
            raise IndexError(f"logp: a target of {int(ids.max())} is not below V = {v}")
    return by_rows(
        lambda x, own, ids: _forward(x, own, ids, top_k, temperature), logits, target, token_ids
    )


def backward(
    logits: Tensor, target: Tensor, m: Tensor, log_s: Tensor, g: Tensor, temperature: float
) -> Tensor:
    """dlogits[T, V]."""
    return by_rows(
        lambda x, own, m, log_s, g: _backward(x, own, m, log_s, g, temperature),
        logits, target, m, log_s, g,
    )  # fmt: skip
