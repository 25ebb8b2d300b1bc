"""Each known module of a side, recomputed in float64 from the inputs that this side recorded.

The weights are the checkpoint's, and the epsilon is the config's. N = rows, F = features.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from rlk_align.engines.common.modules import IN, OUT
from rlk_align.model.sites import RowIndex
from rlk_align.modules.definition import KnownModule, norm
from rlk_align.modules.names import NameIndex
from rlk_align.modules.pairing import Holding, Pairing
from rlk_align.modules.sites import ModuleSite
from rlk_align.modules.stored import StoredWeights
from rlk_align.probe.referee import formulas
from rlk_align.probe.referee.reference import WEIGHT_ELEMENTS
from rlk_align.probe.referee.rounding import ErrorSums, nearest_rounding, rounding_variance
from rlk_align.probe.referee.row_choice import ROWS, SEED
from rlk_align.results import RefereedUnit, SideName
from rlk_align.trace.reader import Trace
from rlk_align.trace.values import RecordedRows

PASS = "prefill"
"""The pass that both sides run."""
BLOCK = 1 << 23
"""Entries of a product that are recomputed at once."""
OPERATORS = {
    "linear": ("o_proj", "matmul"),
    "embedding": ("embed", "elementwise"),
    "rms_norm": ("attn_norm", "reduction"),
    "layer_norm": ("attn_norm", "reduction"),
    "activation": ("act", "elementwise"),
}
"""Formula -> the operator of the catalogue whose budget applies, and its class."""


class NotJudged(Exception):
    """A module cannot be recomputed; the message says why."""


@dataclass(frozen=True)
class Side:
    """One side of the comparison."""

    name: SideName
    trace: Trace
    pairing: Pairing
    recorded: RecordedRows

    @cached_property
    def _recorded_modules(self) -> NameIndex:
        sites = self.recorded.reader.record.sites
        return NameIndex(name.removesuffix(OUT) for name in sites if name.endswith(OUT))

    def activation(self, path: str) -> str:
        """Where the engine has an activation; another engine may have the whole model under another
        name."""
        below = path.partition(".")[2]
        found = self._recorded_modules.same(path) or self._recorded_modules.same(below)
        return found[0] if len(found) == 1 else path


def referee(site: ModuleSite, side: Side, stored: StoredWeights, index: RowIndex) -> RefereedUnit:
    """Recomputes a module of a side. Raises NotJudged."""
    known = site.module.known
    if known is None:
        raise NotJudged(f"unknown class {site.module.kind}")
    held = site.holding(side.pairing)
    path = side.activation(site.path)
    if known.formula != "activation":
        if held is None or not held.whole:
            raise NotJudged("its weight was not found")
        path = held.live.rpartition(".")[0]
    number = _rows(path, side)
    dtype = side.recorded.reader.record.sites[path + OUT].dtype
    module = _Module(known, site, held, side, stored, path)
    x, y = (side.recorded.values(path + end, number[:1]) for end in (IN, OUT))
    width = module.outputs(y.shape[1], x)
    sums = ErrorSums(width, 1, dtype, torch.device("cpu"))
    for at in _blocks(number, max(width, x.shape[1])):
        x, y = (side.recorded.values(path + end, at) for end in (IN, OUT))
        exact, variance, got = module.computed(x, y.double(), dtype)
        sums.add(got, exact, variance, exact.new_zeros(len(exact), 1), at)
    op, op_class = OPERATORS[known.formula]
    return RefereedUnit(
        side=side.name,
        passname=PASS,
        edges=["prefill_vs_train"],
        site=site.name,
        layer=None,
        op=op,
        op_class=op_class,
        rows=len(number),
        errors=sums.errors(index),
        dtype=dtype,
        code=side.trace.record.code.get(path),
    )


def _rows(path: str, side: Side) -> np.ndarray:
    """Row numbers of the batch with values, finite at the input; at most ROWS of them, drawn."""
    record = side.recorded.reader.record
    if path + OUT not in record.sites:
        raise NotJudged(record.unexposed.get(path, "no module of this name"))
    good = side.recorded.has_value(path + OUT) & side.recorded.finite(path + IN)
    number = np.flatnonzero(good)
    if not len(number):
        raise NotJudged("no row has a finite input that was kept")
    random = np.random.default_rng(SEED)
    return np.sort(random.choice(number, min(ROWS, len(number)), replace=False))


def _blocks(number: np.ndarray, width: int) -> Iterator[np.ndarray]:
    step = max(1, BLOCK // width)
    yield from (number[at : at + step] for at in range(0, len(number), step))


class _Module:
    """A module's formula with the checkpoint's weights, rounded to the dtype of the engine's."""

    def __init__(
        self,
        known: KnownModule,
        site: ModuleSite,
        held: Holding | None,
        side: Side,
        stored: StoredWeights,
        path: str,
    ) -> None:
        self._known, self._held = known, held
        self._tensors = {}
        for name, tensor in site.tensors.items():
            live = side.trace.weights.get(f"{path}.{name}")
            dtype = live.dtype if live is not None else side.trace.record.dtype
            self._tensors[name] = stored.read(tensor, dtype)

    def outputs(self, width: int, x: torch.Tensor) -> int:
        """The number of features of its outputs, of which the engine's module returns `width`.
        Raises NotJudged if its inputs and outputs do not fit the formula."""
        formula = self._known.formula
        if (formula == "embedding") == x.dtype.is_floating_point:
            raise NotJudged("never called as a module")
        if formula == "activation":
            if x.shape[1] not in (width, 2 * width):
                raise NotJudged("its inputs and outputs differ in width")
            return width
        weight = self._tensors["weight"]
        if formula == "embedding":
            fits, features = width == weight.shape[1], width
        elif formula == "linear":
            weight = weight.T if self._known.transposed else weight
            columns = self._columns(len(weight))
            fits = weight.shape[1] == x.shape[1] and int(columns.max()) < width
            features = len(weight)
        else:
            fits, features = x.shape[1] == width and width % len(weight) == 0, width
        if not fits:
            raise NotJudged("its inputs and outputs do not fit its weight")
        return features

    def _columns(self, features: int) -> np.ndarray:
        """The features of the engine's output that are this module's: those of the rows that hold
        its weight, or all where the engine's weight is `[in, out]`."""
        assert self._held is not None
        if self._held.transposed == self._known.transposed:
            return self._held.offsets
        return np.arange(features)

    def computed(
        self, x: torch.Tensor, y: torch.Tensor, dtype: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The exact outputs, the variance of their rounding, and the engine's outputs, float64
        `[N, F]` each."""
        known, formula = self._known, self._known.formula
        if formula == "activation":
            width = y.shape[1]
            exact, variance = known.activate(x[:, :width])
            if x.shape[1] > width:
                up = x[:, width:].double()
                exact, variance = exact * up, variance * up.square()
            return exact, rounding_variance(exact, dtype) + variance, y
        weight, bias = self._tensors["weight"], self._tensors.get("bias")
        bias = None if bias is None else bias.double()
        if formula == "embedding":
            exact = weight[x[:, 0].long()].double()
            return exact, rounding_variance(exact, dtype), y
        if formula != "linear":
            exact = norm(known, x.double(), weight.double(), bias)
            return exact, rounding_variance(exact, dtype), y
        weight = weight.T if known.transposed else weight
        x, got = x.double(), y[:, torch.from_numpy(self._columns(len(weight)))]
        exact, sums = _product(x, weight, dtype)
        exact = exact if bias is None else exact + bias
        variance = rounding_variance(exact, dtype) + sums
        if bias is not None:
            # Some engines round the product before they add the bias.
            variance = variance + rounding_variance(exact - bias, dtype)
            exact = nearest_rounding(exact, bias, got, dtype)
        return exact, variance, got


def _product(
    x: torch.Tensor, weight: torch.Tensor, dtype: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """x · weightᵀ and the variance of its sums, in blocks of features: a block of the weight is
    converted to float64 at a time."""
    out, sums = (x.new_empty(len(x), len(weight)) for _ in range(2))
    step = max(1, WEIGHT_ELEMENTS // weight.shape[1])
    for start in range(0, len(weight), step):
        at = slice(start, start + step)
        block = weight[at].double()
        out[:, at] = formulas.linear(x, block, None)
        sums[:, at] = formulas.sum_rounding(x, block, dtype)
    return out, sums
