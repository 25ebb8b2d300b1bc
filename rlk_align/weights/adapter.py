"""A LoRA adapter as PEFT stores it, and the ways in which it may have been merged into a weight.

A merge adds scale · B · A to W. The bits depend on the dtype to which each step is rounded, and on
whether the product or a factor is scaled: `ways` lists each way, and `LowRank.merged` computes it.
The order of the sums in a matrix product is not known, so each entry has an interval that includes
the results of all orders of float32 sums.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from rlk_align.errors import ModelError
from rlk_align.model.adapter import PREFIX, TENSORS, read_settings
from rlk_align.weights.lazy import DTYPES, LazyTensor
from rlk_align.weights.naming import canonical_name
from rlk_align.weights.safetensors import read_safetensors

Order = Literal["once", "update", "product", "factor"]
"""What is rounded: only the sum; scale · (B · A) before it is added; the product B · A before it is
scaled; or the factor scale · B."""


@dataclass(frozen=True, slots=True)
class Merge:
    """One way of merging."""

    order: Order
    base: str
    """The dtype to which W is rounded first."""
    step: str
    """The dtype to which each step is rounded."""
    result: str
    """The dtype of the merged weight."""

    def __str__(self) -> str:
        if self.order == "once":
            return f"W in {self.base}, added up in float32, rounded once to {self.result}"
        if self.order == "update":
            return (
                f"W + scale · B · A, computed in float32 and rounded to {self.step} before the sum"
            )
        formula = {"product": "scale · (B · A)", "factor": "(scale · B) · A"}[self.order]
        return f"W + {formula} with each step in {self.step}"


@dataclass(frozen=True, slots=True)
class Merged:
    """Some rows of a merged weight, with the bounds of float32 sums in any order."""

    low: torch.Tensor
    value: torch.Tensor
    high: torch.Tensor


@dataclass(frozen=True, slots=True)
class LowRank:
    """The update of one parameter by an adapter."""

    a: LazyTensor
    """`[rank, in]`."""
    b: LazyTensor
    """`[out, rank]`."""
    scale: float

    def changes_nothing(self) -> bool:
        """Whether a factor is all zeros, as B is before training."""
        return any(not bool(t.read(None).any()) for t in (self.a, self.b))

    def merged(self, weight: torch.Tensor, way: Merge) -> Iterator[Merged]:
        """The weight merged in one way, in blocks of rows."""
        for block, low, product, high in self._products(weight, way):
            ends = [self._sum(block, p, way) for p in (low, high)]
            yield Merged(torch.minimum(*ends), self._sum(block, product, way), torch.maximum(*ends))

    def unmerged(self, weight: torch.Tensor, way: Merge) -> Iterator[Merged]:
        """The weight merged in one way and unmerged again, in blocks of rows. As PEFT does,
        unmerging subtracts the update rounded to the weight's dtype."""
        for block, *products in self._products(weight, way):
            low, value, high = (self._unmerged(block, p, way) for p in products)
            yield Merged(torch.minimum(low, high), value, torch.maximum(low, high))

    def _unmerged(self, weight: torch.Tensor, product: torch.Tensor, way: Merge) -> torch.Tensor:
        rounded = way.result if way.order == "once" else way.step
        return self._sum(weight, product, way) - self._delta(product, way).to(DTYPES[rounded])

    def _products(
        self, weight: torch.Tensor, way: Merge
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(rows of the weight; B · A of these rows: lower bound, value, upper bound)."""
        stepwise = way.order in ("product", "factor")
        step = DTYPES[way.step] if stepwise else torch.float64
        b, a = (t.read(None).to(step).double() for t in (self.b, self.a))
        if way.order == "factor":
            b = (b * self.scale).to(step).double()
        # The error of adding up `rank` products in float32, in any order, and of scaling them.
        error = (len(a) + 3) * 2.0**-24
        rows = max(1, _BLOCK // max(1, weight.shape[1]))
        for block, factor in zip(weight.split(rows), b.split(rows), strict=True):
            product, slack = factor @ a, error * (factor.abs() @ a.abs())
            yield block, product - slack, product, product + slack

    def _sum(self, weight: torch.Tensor, product: torch.Tensor, way: Merge) -> torch.Tensor:
        """The merged weight, monotone in the product, so that an interval maps to an interval."""
        base, delta = weight.to(DTYPES[way.base]), self._delta(product, way)
        if way.order == "once":
            base = base.float()
        return (base + delta).to(DTYPES[way.result])

    def _delta(self, product: torch.Tensor, way: Merge) -> torch.Tensor:
        """The update as it is added to the weight."""
        if way.order in ("once", "update"):
            exact = (product * self.scale).float()
            return exact if way.order == "once" else exact.to(DTYPES[way.step])
        delta = product.to(DTYPES[way.step])
        return delta * self.scale if way.order == "product" else delta


_BLOCK = 1 << 20
"""The number of entries that are merged at a time."""


def ways(base: str, result: str) -> list[Merge]:
    """Every way of merging into a weight of dtype `base` with a result of dtype `result`."""
    once = [Merge("once", dtype, "float32", result) for dtype in dict.fromkeys((base, result))]
    steps = ("bfloat16", "float16") if result == "float32" else (result,)
    if result == "float32":
        once += [Merge("once", dtype, "float32", result) for dtype in steps if dtype != base]
    rounded = [Merge(o, s, s, result) for s in steps for o in _STEPWISE]
    return [*once, *rounded]


_STEPWISE: tuple[Order, ...] = ("update", "product", "factor")


@dataclass(frozen=True, slots=True)
class Adapter:
    """The contents of an adapter's folder."""

    path: str
    updates: dict[str, LowRank]
    """Updates by canonical parameter."""


def read_adapter(path: str) -> Adapter:
    """Reads an adapter in PEFT's layout.

    Raises ModelError for a folder without an adapter, or for an adapter that does more than add
    B · A; CorruptCheckpoint for a damaged file.
    """
    rank, scale = read_settings(path)
    file = Path(path).expanduser() / TENSORS
    tensors = {t.name: t for t in read_safetensors(file)}
    updates = {}
    for name, tensor in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removesuffix(".lora_A.weight")
        other = tensors.get(f"{module}.lora_B.weight")
        if other is None or tensor.shape[0] != rank or other.shape[1:] != (rank,):
            raise ModelError(f"{file}: {name} or its lora_B does not have rank {rank}")
        plain = f"{module.removeprefix(PREFIX)}.weight"
        updates[canonical_name(plain) or plain] = LowRank(tensor, other, scale)
    if not updates:
        raise ModelError(f"{file} has no lora_A and lora_B")
    return Adapter(path, updates)
