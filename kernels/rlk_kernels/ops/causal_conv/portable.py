"""`causal_conv1d` in PyTorch: the taps are added one by one, in float64."""

from itertools import pairwise

import torch
from torch import Tensor

from rlk_kernels.errors import UnsupportedShape
from rlk_kernels.numerics.column_sum.operator import column_sum
from rlk_kernels.numerics.dtypes import wide_dtype
from rlk_kernels.numerics.elementary import sigmoid
from rlk_kernels.numerics.rows import by_rows


def _places(cu: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(the sequence of each row, its place in it): -1 outside every sequence."""
    bounds = cu.tolist()
    if bounds[0] < 0 or bounds[-1] > rows or sorted(bounds) != bounds:
        raise UnsupportedShape(
            f"causal_conv1d: cu_seqlens {bounds} must rise from 0 to at most {rows}"
        )
    sequence, place = (torch.full((rows,), -1, device=cu.device) for _ in range(2))
    for b, (begin, end) in enumerate(pairwise(bounds)):
        sequence[begin:end] = b
        place[begin:end] = torch.arange(end - begin, device=cu.device)
    return sequence, place


def _earlier(x: Tensor, back: int, place: Tensor) -> Tensor:
    """Row t - back of x[T, F] for each t, if it is of the same sequence; else 0."""
    at = torch.arange(len(x), device=x.device) - back
    return torch.where((place >= back)[:, None], x[at.clamp(min=0)], 0.0)


def _finish(total: Tensor, dtype: torch.dtype) -> Tensor:
    wide = wide_dtype(dtype)
    return by_rows(lambda p: (p * sigmoid(p)).to(wide).to(dtype), total)


def _sums(x: Tensor, weight: Tensor, place: Tensor, rows: Tensor | None = None) -> Tensor:
    """The sums before silu, in float64. rows[T, W - 1, F]: those before each row's sequence."""
    taps, total = weight.shape[1], torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for j in range(taps):
        back = taps - 1 - j
        term = _earlier(x, back, place)
        if rows is not None and back:
            kept = (j + place).clamp(0, taps - 2)
            here = rows[torch.arange(len(x), device=x.device), kept]
            term = torch.where((place < back)[:, None], here, term)
        total += weight[:, j].double() * term.double()
    return torch.where((place >= 0)[:, None], total, 0.0)


def forward(x: Tensor, weight: Tensor, cu: Tensor) -> Tensor:
    """y[T, F]."""
    return _finish(_sums(x, weight, _places(cu, len(x))[1]), x.dtype)


def cached(
    cache: Tensor, x: Tensor, weight: Tensor, slots: Tensor, context: Tensor, cu: Tensor
) -> Tensor:
    """y[T, F] of rows that continue sequences; the cache is written."""
    sequence, place = _places(cu, len(x))
    if outside := [s for s in slots.tolist() if not 0 <= s < len(cache)]:
        raise IndexError(f"cached_causal_conv1d: slot {outside[0]} is not in 0..{len(cache) - 1}")
    slots, taps = slots.long(), weight.shape[1]
    kept = torch.where((context > 0)[:, None, None], cache[slots], 0.0)
    out = _finish(_sums(x, weight, place, kept[sequence]), x.dtype)
    for b, (begin, end) in enumerate(pairwise(cu.tolist())):
        if begin < end:
            cache[slots[b]] = torch.cat([kept[b], x[begin:end]])[1 - taps :]
    return out


def backward(x: Tensor, weight: Tensor, cu: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """(dx, dweight in fp32)."""
    wide, taps = wide_dtype(x.dtype), weight.shape[1]
    _, place = _places(cu, len(x))
    p = _sums(x, weight, place)
    s = sigmoid(p)
    dp = torch.where((place >= 0)[:, None], dy.double() * s * (1.0 + p * (1.0 - s)), 0.0)
    dx = torch.zeros_like(dp)
    columns = []
    for j in range(taps):
        back = taps - 1 - j
        columns.append((dp * _earlier(x, back, place).double()).to(wide))
        later = torch.where((place >= back)[:, None], weight[:, j].double() * dp, 0.0)
        dx[: len(x) - back] += later[back:]
    dweight = [column_sum(column, "torch") for column in columns]
    return dx.to(wide).to(x.dtype), torch.stack(dweight, 1)
