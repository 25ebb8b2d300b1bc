"""`sample` in PyTorch: a stable sort, integer masses, and the walk down the tree in float64."""

import functools
import math

import torch
from torch import Tensor

from rlk_kernels.numerics import elementary
from rlk_kernels.numerics.lse_tree.portable import block_portable
from rlk_kernels.numerics.lse_tree.tree import levels
from rlk_kernels.numerics.rows import by_rows
from rlk_kernels.ops.sample.draws import uniform

MASS = 2.0**40
"""The mass of a column is a multiple of its reciprocal."""


def _divided(x: Tensor, temperature: Tensor) -> Tensor:
    """z in float64, rounded as x is."""
    heat = torch.where(temperature == 0, 1.0, temperature).to(x.dtype)
    return (x / heat[:, None]).double()


def _kept(x, z, temperature, top_k, top_p, min_p):
    """bool [T, V] in the order of the columns."""
    greedy = (temperature == 0)[:, None]
    ranked, order = torch.sort(x, dim=-1, descending=True, stable=True)
    kept = ranked > -math.inf
    column = torch.arange(x.shape[1], device=x.device)[None]
    if min_p is not None:
        lowest = ranked[:, 0].double() + temperature.double() * elementary.log(min_p)
        lowest = lowest.to(x.dtype)[:, None]
        kept &= (min_p <= 0)[:, None] | greedy | (ranked >= lowest)
    if top_k is not None:
        kept &= (top_k < 1)[:, None] | greedy | (column < top_k[:, None])
    if top_p is not None:
        mass = elementary.exp(z - z.amax(-1, keepdim=True)).gather(-1, order)
        mass = torch.where(kept, mass * MASS, 0.0).long()  # a conversion drops the fraction
        sums = mass.cumsum(-1)
        need = (top_p.double() * sums[:, -1].double()).ceil().long().clamp(min=1)[:, None]
        kept &= (top_p >= 1)[:, None] | greedy | (sums - mass < need)
    kept &= ~greedy | (column == 0)
    return torch.zeros_like(kept).scatter_(-1, order, kept)


def _walk(z, kept, u):
    """The drawn columns [T]."""
    top = torch.where(kept, z, -math.inf).amax(-1, keepdim=True)
    s = torch.where(kept, elementary.exp(z - top), 0.0)
    column = torch.arange(z.shape[1], device=z.device).expand_as(s)
    for h in range(u.shape[1]):
        if s.shape[1] % 2:
            s, column = (torch.cat([a, torch.zeros_like(a[:, :1])], 1) for a in (s, column))
        (left, right), (a, b) = (
            s.unflatten(1, (-1, 2)).unbind(-1),
            column.unflatten(1, (-1, 2)).unbind(-1),
        )
        s = left + right
        column = torch.where(u[:, h, None] * s < left, a, b)
    return column[:, 0]


def _logprob(z, ids):
    """fp32 or float64 [T], and log s + m of the row."""
    m, s = block_portable(z)
    log_s = elementary.log(s)
    return (z.gather(-1, ids[:, None])[:, 0] - m) - log_s, m + log_s


def _rows(op, raw, x, row, keys, positions, temperature, top_k, top_p, min_p):
    x, wide = _widened(op, x, row)
    z = _divided(x, temperature)
    kept = _kept(x, z, temperature, top_k, top_p, min_p)
    ids = _walk(z, kept, uniform(keys, positions, levels(x.shape[1])))
    logprob, lse = _logprob(torch.where(kept, z, -math.inf), ids)
    greedy = temperature == 0
    mass = elementary.exp(lse - _logprob(z, ids)[1])
    results = [torch.where(greedy, 0.0, logprob), torch.where(greedy, 1.0, mass)]
    results.append(_logprob(x.double(), ids)[0] if raw else logprob[:0])
    logprob, mass, raw_logprob = (a.to(wide) for a in results)
    return ids, logprob, kept.sum(-1).int(), mass, raw_logprob


def _widened(op: str, x: Tensor, row: Tensor) -> tuple[Tensor, torch.dtype]:
    """x in fp32 or float64, with +0 for -0. Raises ValueError for rows without a distribution."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    x = x.to(wide) + 0.0
    top = x.amax(-1)
    if not bool(top.isfinite().all()):
        first = int(row[(~top.isfinite()).nonzero()[0, 0]])
        raise ValueError(
            f"{op}: row {first} of the logits has no distribution: it has NaN or +inf, or no "
            "logit above -inf"
        )
    return x, wide


def _numbered(logits: Tensor, first: int = 0) -> Tensor:
    return torch.arange(first, first + logits.shape[0], device=logits.device)


def sample(
    logits: Tensor, keys: Tensor, positions: Tensor, temperature: Tensor, top_k: Tensor | None,
    top_p: Tensor | None, min_p: Tensor | None, raw: bool, op: str = "sample", first: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(ids, logprobs, kept, mass, raw logprobs). An error names the operator `op`, and the row by
    its number from `first` on."""
    return by_rows(
        functools.partial(_rows, op, raw), logits, _numbered(logits, first), keys, positions,
        temperature, top_k, top_p, min_p,
    )  # fmt: skip


def kept_tokens(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None,
    min_p: Tensor | None,
) -> Tensor:  # fmt: skip
    """bool [T, V]."""

    def run(x, row, temperature, *limits):
        x = _widened("kept_tokens", x, row)[0]
        return _kept(x, _divided(x, temperature), temperature, *limits)

    return by_rows(run, logits, _numbered(logits), temperature, top_k, top_p, min_p)
