"""What merging and unmerging a LoRA adapter leaves in the weight below it.

    merged   = round(W + scale · B · A)
    unmerged = round(merged - round(scale · B · A))

In bfloat16 a part of the entries does not return to W. Trainers that give merged weights to a
rollout engine, like TRL, do this to their own base at each synchronisation, so the errors add up.
One merge and unmerge is recognised by its values; several of them, with unknown adapters, can only
be suspected.
"""

from dataclasses import dataclass

import torch

from rlk_align.trace.digest import digest_parameter
from rlk_align.weights.adapter import LowRank, Merge, ways
from rlk_align.weights.lazy import DTYPES
from rlk_align.weights.parameter import Parameter

FEW_ULP = 8.0
"""Nine in ten of the differences that several merges leave are at most this large."""
MOST_SIGMA = 5.0
"""Rounding has no preferred sign: signs that lean further to one side have another cause."""


@dataclass(frozen=True, slots=True)
class Distance:
    """How a weight differs from the weight that it should be."""

    differing: float
    """The share of entries that differ."""
    most: float
    """The largest difference, in ulp of the larger of |W| and the merged value."""
    common: float
    """The ulp that nine in ten of the differences do not exceed."""
    lean: float
    """|the sum of the differences' signs|, in standard deviations of random signs."""

    def __str__(self) -> str:
        return f"differs by at most {self.most:.3g} ulp in {self.differing:.2%} of its entries"


def unmerged_once(update: LowRank, a: Parameter, b: Parameter) -> Distance | None:
    """How B differs from A if it is A after merging and unmerging the adapter once, in any way of
    merging; otherwise None. The result is also None if A's values are not known."""
    weight, value = a.value(), b.value()
    if weight is None or b.dtype not in DTYPES:
        return None
    for way in ways(a.dtype, b.dtype):
        left = list(update.unmerged(weight, way))
        if value is None:
            value_of_way = torch.cat([part.value for part in left])
            if digest_parameter(value_of_way) == b.digest:
                return distance(update, weight, value_of_way)
            continue
        pairs = zip(left, value.split([len(part.value) for part in left]), strict=True)
        if all(bool(((p.low <= block) & (block <= p.high)).all()) for p, block in pairs):
            return distance(update, weight, value)
    return None


def suspected(update: LowRank, a: Parameter, b: Parameter) -> Distance | None:
    """How B differs from A if several merges may have left the difference: it is small and has no
    preferred sign. Otherwise None."""
    weight, value = a.value(), b.value()
    if weight is None or value is None:
        return None
    found = distance(update, weight, value)
    small = found.common <= FEW_ULP and found.lean <= MOST_SIGMA
    return found if small else None


def distance(update: LowRank, weight: torch.Tensor, value: torch.Tensor) -> Distance:
    """How `value` differs from `weight`, rounded to its dtype."""
    way = Merge("once", "float32", "float32", "float32")
    merged = torch.cat([part.value for part in update.merged(weight, way)])
    wanted = weight.to(value.dtype).float()
    off = value.float() - wanted
    ulp = (off.abs() / _spacing(torch.maximum(merged.abs(), wanted.abs()), value.dtype))[off != 0]
    if not ulp.numel():
        return Distance(0.0, 0.0, 0.0, 0.0)
    common = ulp.kthvalue(-(-9 * ulp.numel() // 10)).values
    lean = off.sign().sum().abs() / ulp.numel() ** 0.5
    return Distance(ulp.numel() / off.numel(), float(ulp.max()), float(common), float(lean))


def _spacing(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance of neighbours in `dtype` at each float32 x >= 0."""
    numbers = torch.finfo(dtype)
    _, exponent = torch.frexp(x.clamp(min=numbers.tiny))
    return torch.ldexp(torch.full_like(x, numbers.eps), exponent - 1)
