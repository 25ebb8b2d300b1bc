"""Two holders of one model's weights -> what became of each parameter.

Bits are compared if both sides have them, and digests if one side is a recording. A difference is
explained by the first of: a cast, a merged adapter, an adapter that was merged and unmerged, an
earlier step, another parameter, some slices of an earlier step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from rlk_align.compare.parity_weights import Difference, Shards, Sides, difference
from rlk_align.progress import Progress, silent
from rlk_align.trace.digest import digest_parameter, digest_slices
from rlk_align.trace.reader import Weight
from rlk_align.weights.adapter import Adapter, LowRank, Merge, ways
from rlk_align.weights.findings import Finding, ParameterState, Status, WeightsReport
from rlk_align.weights.holder import WeightHolder
from rlk_align.weights.lazy import DTYPES
from rlk_align.weights.parameter import Parameter, QuantisedParameter, RecordedParameter
from rlk_align.weights.quantiser import origin_of
from rlk_align.weights.quantiser_words import why_left_out, words_of
from rlk_align.weights.unmerged import suspected, unmerged_once

_SIDES = Sides("A", "B", "A's")
_ROUNDINGS = ("bfloat16", "float16")
"""The dtypes whose values a wider dtype may have."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """An earlier checkpoint of the same training run."""

    step: str
    holder: WeightHolder


@dataclass(slots=True)
class Comparer:
    """Compares parameters one by one."""

    a: WeightHolder
    b: WeightHolder
    earlier: Sequence[Earlier] = ()
    adapter: Adapter | None = None
    digests: dict[tuple[str, str], str] = field(default_factory=dict)
    """(parameter of A, dtype to which it is rounded) -> digest."""

    def report(self, progress: Progress = silent) -> WeightsReport:
        """What became of every parameter that either side has."""
        names = list(dict.fromkeys([*self.a.parameters, *self.b.parameters]))
        findings = []
        for done, name in enumerate(names):
            progress("parameters", done, len(names))
            findings.append(self.finding(name))
        return WeightsReport(
            a=self.a.path,
            b=self.b.path,
            kinds=(self.a.kind, self.b.kind),
            earlier=[e.step for e in self.earlier],
            adapter=self.adapter.path if self.adapter else None,
            findings=findings,
        )

    def finding(self, name: str) -> Finding:
        """What became of one parameter."""
        a, b = self.a.parameters.get(name), self.b.parameters.get(name)
        if a is None or b is None:
            side = "A" if a is None else "B"
            return Finding(
                name=name,
                status="missing",
                detail=f"{side} lacks it",
                a=_state(a, False),
                b=_state(b, False),
            )
        if a.shape != b.shape:
            detail = f"A's shape is {list(a.shape)}, B's is {list(b.shape)}"
            return _finding(a, b, "other", detail, digested=False)
        if (count := _not_finite(b)) or (count := _not_finite(a)):
            detail = f"{count:,} of {math.prod(a.shape):,} entries are NaN or infinite"
            return _finding(a, b, "other", detail, digested=False)
        if ranks := _other_copies(b):
            return self._copies(a, b, ranks)
        rounding = _rounding(a, b)
        if self._left_out(b.name):
            detail = f"B does not quantise it; {why_left_out(self.b.left_out[b.name])}"
            return _finding(a, b, "other", detail, digested=False)
        if rounding is None and isinstance(b, QuantisedParameter):
            return self._quantised(a, b)
        if rounding is None:
            return self._explained(a, b)
        if self._lacks_adapter(a, b):
            detail = "A's base: the adapter is not merged into it"
            return _finding(a, b, "stale", detail, step="the base")
        if rounding:
            return _finding(a, b, "cast", rounding, digested=False)
        return _finding(a, b, "equal", digested=False)

    def _left_out(self, name: str) -> bool:
        """Whether B should have quantised a parameter that A has not quantised either."""
        return name in self.b.left_out and not isinstance(
            self.a.parameters[name], QuantisedParameter
        )

    def _quantised(self, a: Parameter, b: QuantisedParameter) -> Finding:
        """A parameter that B stores in blocks of fp8."""
        weight, stored = a.value(), b.quantised()
        if weight is None:
            return _finding(a, b, "other", "it is not the dequantised weight of A's engine")
        origin = origin_of(stored, weight)
        if origin.kind == "image":
            way = f", computed as {origin.way}" if origin.way else ""
            detail = f"{b.stored}: the quantiser's image of A{way}"
            return _finding(a, b, "quantised", detail, digested=False)
        for earlier in self.earlier:
            old = earlier.holder.parameters.get(b.name)
            value = None if old is None or old.shape != b.shape else old.value()
            if value is not None and origin_of(stored, value).kind == "image":
                detail = f"the quantiser's image of {earlier.step}"
                return _finding(a, b, "stale", detail, step=earlier.step)
        return _finding(a, b, "other", f"{b.stored}: {words_of(origin.kind, {b.name: origin})}")

    def _lacks_adapter(self, a: Parameter, b: Parameter) -> bool:
        """Whether B equals A, although every way of merging the adapter would change A."""
        update, value = self._update(a), a.value()
        if update is None or value is None or update.changes_nothing():
            return False
        return self._merged(a, b) is None

    def _copies(self, a: Parameter, b: Parameter, ranks: dict[int, Parameter]) -> Finding:
        """A parameter whose copy on some ranks differs from that of rank 0."""
        who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        detail, at = f"B's {who}: another copy than rank 0", list(ranks)
        steps = {self._step(a.name, copy) for copy in ranks.values()}
        step = steps.pop() if len(steps) == 1 else None
        if step is None:
            return _finding(a, b, "other", detail, ranks=at)
        return _finding(a, b, "stale", f"{detail}, from {step}", step=step, ranks=at)

    def _step(self, name: str, b: Parameter) -> str | None:
        """The latest earlier checkpoint with B's value."""
        for earlier in self.earlier:
            old = earlier.holder.parameters.get(name)
            if old and old.shape == b.shape and _rounding(old, b) is not None:
                return earlier.step
        return None

    def _explained(self, a: Parameter, b: Parameter) -> Finding:
        """A parameter that is neither equal to A's nor a rounding of it."""
        if merged := self._merged(a, b):
            return _finding(a, b, "merged", merged)
        update = self._update(a)
        if update and (left := unmerged_once(update, a, b)):
            return _finding(
                a, b, "unmerged",
                f"{left}: what merging and unmerging the adapter once in {b.dtype} leaves",
            )  # fmt: skip
        if step := self._step(a.name, b):
            return _finding(a, b, "stale", f"B has the value of {step}", step=step)
        if other := self._elsewhere(b):
            return _finding(a, b, "other", f"B holds what A has as {other}")
        return self._in_part(a, b)

    def _update(self, a: Parameter) -> LowRank | None:
        """What the adapter adds to a parameter."""
        return self.adapter.updates.get(a.name) if self.adapter else None

    def _merged(self, a: Parameter, b: Parameter) -> str | None:
        """How the adapter was merged into B; None if it was not."""
        update, value = self._update(a), a.value()
        if update is None or value is None:
            return None
        fits = [fit for way in ways(a.dtype, b.dtype) if (fit := _fit(update, value, way, b))]
        if not fits:
            return None
        differing, way = min(fits, key=lambda fit: fit[0])
        counted = f"; {differing:,} of {math.prod(a.shape):,} entries round differently"
        return f"the adapter: {way}{counted if differing else ''}"

    def _elsewhere(self, b: Parameter) -> str | None:
        """The other parameter of A whose value B has here."""
        for name, other in self.a.parameters.items():
            if name != b.name and other.shape == b.shape and self._digest_as(other, b) == b.digest:
                return name
        return None

    def _digest_as(self, parameter: Parameter, b: Parameter) -> str:
        """The digest of a parameter of A, rounded to the dtype of B."""
        key = (parameter.name, b.dtype)
        if key not in self.digests:
            value = parameter.value()
            if isinstance(parameter, RecordedParameter):
                self.digests[key] = parameter.weight.casts.get(b.dtype, parameter.digest)
            elif value is None or parameter.dtype == b.dtype:
                self.digests[key] = parameter.digest
            else:
                self.digests[key] = digest_parameter(value.to(DTYPES[b.dtype]))
        return self.digests[key]

    def _in_part(self, a: Parameter, b: Parameter) -> Finding:
        """A parameter of which some slices may have the values of an earlier step."""
        x, y = a.value(), b.value()
        rounded = _Sliced(a.name, a.shards, _rounded_slices(a, b.dtype))
        part = difference(rounded, b, _SIDES, self.a.head_dim or self.b.head_dim)
        count, largest = (None, None) if x is None or y is None else _entries(x.to(y.dtype), y)
        step = self._step_of_slices(b, part)
        detail = f"{part.detail}: they are those of {step}" if step else part.detail
        update = self._update(a)
        if not step and update and (left := suspected(update, a, b)):
            detail += (
                f"; it {left}, in both directions alike: merging and unmerging other adapters "
                f"in {b.dtype} may have left that, or a small change of the weight"
            )
        return _finding(
            a,
            b,
            "stale" if step else "other",
            detail,
            step=step,
            ranks=part.ranks,
            differing=count,
            largest=largest,
        )

    def _step_of_slices(self, b: Parameter, part: Difference) -> str | None:
        """The earlier checkpoint whose slices B has where it differs from A."""
        mine = b.slices[part.dim][part.at]
        for earlier in self.earlier:
            old = earlier.holder.parameters.get(b.name)
            if old is None or old.shape != b.shape or not len(mine):
                continue
            if np.array_equal(_rounded_slices(old, b.dtype)[part.dim][part.at], mine):
                return earlier.step
        return None


class _Sliced(NamedTuple):
    """A parameter by its slices."""

    name: str
    shards: Shards
    slices: tuple[np.ndarray, np.ndarray]


def _rounded_slices(parameter: Parameter, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """The slices of a parameter that is rounded to another dtype."""
    if isinstance(parameter, RecordedParameter):
        return parameter.slices_as(dtype)
    value = parameter.value()
    if value is None or dtype == parameter.dtype:
        return parameter.slices
    return digest_slices(value.to(DTYPES[dtype]))


def _finding(
    a: Parameter,
    b: Parameter,
    status: Status,
    detail: str = "",
    *,
    step: str | None = None,
    ranks: Sequence[int] = (),
    differing: int | None = None,
    largest: float | None = None,
    digested: bool = True,
) -> Finding:
    """`digested`: whether to digest the values of both sides, which reads them again."""
    return Finding(
        name=a.name,
        status=status,
        detail=detail,
        step=step,
        ranks=list(ranks),
        a=_state(a, digested),
        b=_state(b, digested),
        differing=differing,
        max_abs_difference=largest,
    )


def _state(parameter: Parameter | None, digested: bool) -> ParameterState | None:
    if parameter is None:
        return None
    known = digested or isinstance(parameter, RecordedParameter)
    digest = parameter.digest if known else None
    return ParameterState(parameter.dtype, parameter.shape, digest)


def _fit(
    update: LowRank, weight: torch.Tensor, way: Merge, b: Parameter
) -> tuple[int, Merge] | None:
    """(the number of entries of B that round differently, the way of merging) if that way explains
    B; otherwise None."""
    value = b.value()
    if value is None:
        whole = torch.cat([m.value for m in update.merged(weight, way)])
        return (0, way) if digest_parameter(whole) == b.digest else None
    differing = start = 0
    for merged in update.merged(weight, way):
        block = value[start : start + len(merged.value)]
        if not bool(((merged.low <= block) & (block <= merged.high)).all()):
            return None
        differing += int((merged.value != block).sum())
        start += len(block)
    return differing, way


def _rounding(a: Parameter, b: Parameter) -> str | None:
    """Which side is a rounding of the other, in words; empty if both have the same values, None if
    neither is a rounding."""
    x, y = a.value(), b.value()
    if isinstance(a, RecordedParameter) and isinstance(b, RecordedParameter):
        return _recorded_rounding(a.weight, b.weight)
    for value, other, words in ((x, b, "B is A"), (y, a, "A is B")):
        dtype = None if value is None else _rounded_to(value, other)
        if dtype is not None:
            return f"{words} rounded to {dtype}" if dtype else ""
    return None


def _recorded_rounding(a: Weight, b: Weight) -> str | None:
    """`_rounding` of two recordings, by their digests."""
    if a.digest == b.digest:
        return ""
    for wide, narrow, words in ((a, b, "B is A"), (b, a, "A is B")):
        if wide.casts.get(narrow.dtype) == narrow.digest:
            return f"{words} rounded to {narrow.dtype}"
    return None


def _rounded_to(value: torch.Tensor, other: Parameter) -> str | None:
    """The dtype to which `value` was rounded for the other side; empty if the rounding loses
    nothing, None if no rounding gives the other side's values."""
    if not value.dtype.is_floating_point:
        return "" if _holds(other, value) else None
    for name in dict.fromkeys((other.dtype, *_ROUNDINGS)):
        rounded = value.to(DTYPES[name])
        if _holds(other, rounded):
            lossless = _same_values(rounded.to(value.dtype), value)
            stored = f", stored as {other.dtype}" if name != other.dtype else ""
            return "" if lossless else f"{name}{stored}"
    return None


def _holds(parameter: Parameter, value: torch.Tensor) -> bool:
    """Whether the parameter has these values; a NaN equals nothing."""
    actual = parameter.value()
    if actual is None:
        return digest_parameter(value) == parameter.digest
    wanted = value.to(actual.dtype)
    return _same_bits(wanted, actual) or _same_values(wanted, actual)


def _same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors have the same bytes, which is the fastest comparison."""
    return torch.equal(_bytes(x), _bytes(y))


def _same_values(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(_computable(x), _computable(y))


def _computable(x: torch.Tensor) -> torch.Tensor:
    """The same values in a dtype that torch compares: it lacks floats of eight bits."""
    return x.float() if x.dtype.is_floating_point and x.dtype.itemsize == 1 else x


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def _not_finite(parameter: Parameter) -> int:
    """The number of entries that are NaN or infinite; 0 for a recording, which refuses them."""
    value = parameter.value()
    if value is None or not value.dtype.is_floating_point or not value.numel():
        return 0
    wide = _computable(value)
    if all(bool(torch.isfinite(end)) for end in wide.aminmax()):
        return 0
    return int((~torch.isfinite(wide)).sum())


def _other_copies(parameter: Parameter) -> dict[int, Parameter]:
    """Rank -> its copy of a replicated parameter, for copies that differ from that of rank 0."""
    if not isinstance(parameter, RecordedParameter):
        return {}
    weight = parameter.weight
    return {
        rank: replace(parameter, weight=replace(weight, digest=digest))
        for rank, digest in weight.copies.items()
        if digest != weight.digest
    }


def _entries(x: torch.Tensor, y: torch.Tensor) -> tuple[int, float]:
    """(the number of entries that differ, the largest difference in magnitude)."""
    count, largest = 0, 0.0
    blocks = zip(*(t.reshape(-1).split(1 << 20) for t in (x, y)), strict=True)
    for mine, theirs in blocks:
        distance = (mine.double() - theirs.double()).abs()
        count += int((distance != 0).sum())
        largest = max(largest, float(distance.max()))
    return count, largest
