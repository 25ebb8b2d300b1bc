"""Errors in units of an operator's own rounding: how large, how systematic, and where.

The unit of an element is what rounding its exact value to the side's dtype leaves in the mean,
ulp / √12, together with whatever else the operator has to round on its way. Errors are summed
over rows or features before they are divided, so that an element that cancels to almost nothing
does not count by its own tiny ulp.

A systematic part (a gain, a shift) is counted as far as it stands out: by what is left of it
after six of its own standard errors, so that few rows raise no alarm.
"""

import math

import numpy as np
import torch

from rlk_align.model.dtypes import DTYPES
from rlk_align.model.sites import RowIndex
from rlk_align.probe.referee.pattern import Rows, Totals, pattern
from rlk_align.results import RoundingErrors

STANDARD_ERRORS = 6.0
"""Of the largest of a million features, about five are chance."""
_LEAST_EXPONENT = {"float16": -14, "bfloat16": -126, "float32": -126}


def relative_unit(dtype: str) -> float:
    """What rounding to `dtype` leaves of a number just above a power of two, in the mean: 2^-p / √3
    with p significant bits. Gains are counted in it."""
    return 2.0 ** -DTYPES[dtype] / math.sqrt(3)


def rounding_variance(exact: torch.Tensor, dtype: str) -> torch.Tensor:
    """(ulp / 2)² / 3 of each float64 entry in `dtype`: the variance of a rounding error that is
    uniform over an ulp."""
    exponent = torch.frexp(exact).exponent.clamp_(min=_LEAST_EXPONENT[dtype] + 1)
    # 4^exponent, put together from its bits: float64 keeps the exponent above 52 others.
    power = (2 * (exponent.long() - DTYPES[dtype] - 1) + 1023) << 52
    return power.view(torch.float64) / 3


class ErrorSums:
    """Collects one operator's errors, block by block. N = rows, F = features, G = heads."""

    def __init__(self, features: int, heads: int, dtype: str, device: torch.device) -> None:
        """`heads`: in how many heads the features lie, 1 where they are no heads'."""
        self._dtype, self._heads = dtype, heads
        self._rows = 0
        # By feature: error, error², error⁴, unit², error·exact, exact², (error·exact)².
        self._sums = torch.zeros(7, features, dtype=torch.float64, device=device)
        # By row: error², unit², error·exact, exact².
        self._by_row: list[torch.Tensor] = []
        self._numbers: list[np.ndarray] = []
        self._row_gain = self._scaled_by_row = 0.0
        self._peak = 0.0

    def add(
        self, got: torch.Tensor, exact: torch.Tensor, variance: torch.Tensor, number: np.ndarray
    ) -> None:
        """float64 `[N, F]` each: what the side has, what is exact, and the squared unit; `number`
        `[N]`: which rows they are."""
        error = got - exact
        product, square = error * exact, error.square()
        parts = (error, square, square.square(), variance, product, exact.square(), product**2)
        for total, part in zip(self._sums, parts, strict=True):
            total += part.sum(dim=0)
        of_rows = [t.sum(dim=1) for t in (square, variance, product, parts[5])]
        self._by_row.append(torch.stack(of_rows))
        self._numbers.append(number)
        unit = torch.maximum(variance, variance.mean(dim=1, keepdim=True))
        # A NaN is over any budget; where nothing may be off, anything is infinitely off.
        ratio = (square / unit).where((square > 0) | (unit > 0), 0.0).nan_to_num(nan=math.inf)
        self._peak = max(self._peak, math.sqrt(float(ratio.max())))
        if error.shape[1] > self._heads:
            self._add_row_gains(error, product, exact)

    def _add_row_gains(
        self, error: torch.Tensor, product: torch.Tensor, exact: torch.Tensor
    ) -> None:
        """The squared gain of each row, in each head, less what chance makes of it."""
        by_head = (len(error), self._heads, -1)
        e, p, y = (t.reshape(by_head) for t in (error, product, exact))
        power, width = y.square().sum(dim=-1), y.shape[-1]
        gain = p.sum(dim=-1) / power
        left = (e - gain[..., None] * y) * y
        chance = left.square().sum(dim=-1) / power.square() * (width / (width - 1))
        self._row_gain += float((gain**2 - chance).where(power > 0, 0.0).mean(dim=1).sum())
        self._scaled_by_row += float((gain**2 * power).where(power > 0, 0.0).sum())

    def errors(self, index: RowIndex) -> RoundingErrors:
        """What was collected, in units of rounding; infinite where a NaN was."""
        unit = relative_unit(self._dtype)
        number, by_row = np.concatenate(self._numbers), torch.cat(self._by_row, dim=1)
        n, row_rms = len(number), (by_row[0] / by_row[1]).nan_to_num(nan=math.inf).sqrt()
        error, square, fourth, variance, product, power, products = self._sums
        rms = float((square.sum() / variance.sum()).sqrt().nan_to_num(nan=math.inf))
        # By chance alone a feature's errors are off by these, and never by less than their size.
        floor = rms**2 * variance / n
        deviation = torch.maximum(square / n - (error / n).square(), floor).div(n).sqrt()
        spread = torch.maximum(fourth / n - (square / n).square(), 2 * floor.square()).div(n).sqrt()
        own = (variance / n).sqrt()
        feature_rms = (_beyond(square / n, spread) / own.square()).clamp(min=0).sqrt()
        shift = _beyond(error / n, deviation) / own
        gain = _gain(product, power, products)
        by_head = [t.reshape(self._heads, -1).sum(dim=1) for t in (product, power, products)]
        of_feature = [_largest(x) for x in (feature_rms, shift, gain / unit)]
        head_gain, head = _largest(_gain(*by_head) / unit)
        return RoundingErrors(
            rms=rms,
            gain=float(_gain(product.sum(), power.sum(), products.sum()) / unit),
            row_gain=math.sqrt(max(0.0, self._row_gain / n)) / unit,
            head_gain=head_gain if self._heads > 1 else 0.0,
            head=head if self._heads > 1 else 0,
            feature_rms=of_feature[0][0],
            feature_shift=of_feature[1][0],
            feature_gain=of_feature[2][0],
            feature=max(of_feature, key=lambda found: abs(found[0]))[1],
            row_rms=float(row_rms.max()),
            row=index.locate(int(number[int(row_rms.argmax())])),
            peak=self._peak,
            unit=unit,
            pattern=pattern(
                Totals(*by_row.cpu().numpy()),
                Totals(*(t.cpu().numpy() for t in (square, variance, product, power))),
                Rows(number, index.token[number], index.position[number]),
                self._heads,
                (error / n).cpu().numpy(),
                self._scaled_by_row,
            ),
        )


def _beyond(value: torch.Tensor, standard_error: torch.Tensor) -> torch.Tensor:
    """What of a value stands out of chance, with its sign."""
    return value.sign() * (value.abs() - STANDARD_ERRORS * standard_error).clamp(min=0)


def _gain(product: torch.Tensor, power: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    """The error regressed on the exact output, as far as it stands out; 0 where that is 0, and
    infinite where it is not finite."""
    gain = _beyond(product / power, products.sqrt() / power)
    return gain.nan_to_num(nan=math.inf).where(power != 0, 0.0)


def _largest(values: torch.Tensor) -> tuple[float, int]:
    """The value of the largest magnitude, a NaN being infinite, and where it is."""
    at = int(values.abs().nan_to_num(nan=math.inf).argmax())
    return _number(values[at]), at


def _number(value: torch.Tensor) -> float:
    return float(value.nan_to_num(nan=math.inf))
