"""Errors in units of an operator's own rounding: their size, their systematic part, and where they
are.

The unit of an element is the root mean square error of rounding its exact value to the side's
dtype, ulp / √12, combined with the other roundings within the operator. Errors are summed over rows
or features before they are divided, so that an element that cancels to almost nothing does not
count by its own tiny ulp.

A systematic part (a gain or a shift) is measured on the distance to the correctly rounded output,
because rounding alone has a bias if a feature hardly varies. As many of its standard errors are
subtracted as the largest of so many figures reaches by chance (`judge.chance`), so that a few rows
raise no alarm. No row counts for more than a few others: the first token of a sequence may be a
thousand times as large as the rest.
"""

import math

import numpy as np
import torch

from rlk_align.judge.chance import deviations
from rlk_align.model.dtypes import DTYPES
from rlk_align.model.sites import RowIndex
from rlk_align.probe.referee.correlated import CorrelatedErrors
from rlk_align.probe.referee.pattern import RowLabels, Totals, pattern
from rlk_align.results import RoundingErrors

LARGEST_ROW = 4.0
"""A large row counts for at most this many typical rows."""
FEATURE_ROWS = 16
"""With fewer rows the statistics of single features are 0; `peak` covers single entries."""
SQUARE_VARIANCE = 0.8
"""The variance of the square of a uniform rounding error whose mean square is 1."""
_LEAST_EXPONENT = {"float16": -14, "bfloat16": -126, "float32": -126}
_ONE_HALF = 1022
"""The bits of the exponent of the float64 numbers from 1/2 to 1."""


def relative_unit(dtype: str) -> float:
    """The root mean square of the relative error of rounding a number just above a power of two to
    `dtype`: 2^-p / √3 with p significant bits. It is the unit of gains."""
    return 2.0 ** -DTYPES[dtype] / math.sqrt(3)


def rounding_variance(exact: torch.Tensor, dtype: str) -> torch.Tensor:
    """(ulp / 2)² / 3 of each float64 entry in `dtype`: the variance of a rounding error that is
    uniform over an ulp."""
    # float64 has its exponent above 52 bits of the significand.
    exponent = exact.view(torch.int64).bitwise_right_shift(52).bitwise_and_(0x7FF)
    exponent.masked_fill_(exponent == 0x7FF, _ONE_HALF)  # of what is not finite
    exponent.clamp_(min=_LEAST_EXPONENT[dtype] + 1 + _ONE_HALF)
    # 4^(exponent - significant bits - 1), by its bits.
    exponent.mul_(2).sub_(2 * (_ONE_HALF + DTYPES[dtype] + 1) - 1023)
    return exponent.bitwise_left_shift_(52).view(torch.float64).div_(3)


def nearest_rounding(
    exact: torch.Tensor, bias: torch.Tensor, got: torch.Tensor, dtype: str
) -> torch.Tensor:
    """Returns `exact`, a product plus its bias, float64 `[N, F]`; or, if `got` is closer to a sum
    whose product was rounded before, that sum where `got` equals it (`Reference.nearest`)."""
    rounded = getattr(torch, dtype)
    once = exact.to(rounded).double()
    twice = ((exact - bias).to(rounded).double() + bias).to(rounded).double()
    distances = [(got - each).square().sum() for each in (once, twice)]
    return twice.where(got == twice, exact) if distances[1] < distances[0] else exact


def cut_center(exact: torch.Tensor, dtype: str) -> torch.Tensor:
    """The float64 numbers half an ulp nearer to zero, and those that `dtype` has as they are:
    rounding these to `dtype` gives `exact` cut off, and the error of cutting has no bias against
    them."""
    half_ulp = (3 * rounding_variance(exact, dtype)).sqrt()
    held = exact.to(getattr(torch, dtype)).double() == exact
    return exact.where(held, exact - torch.copysign(half_ulp, exact))


def nearest_cut(exact: torch.Tensor, got: torch.Tensor, dtype: str) -> torch.Tensor:
    """Returns `exact`, float64 `[N, F]`; or its `cut_center` if `got` is closer to `exact` cut off
    than to `exact` rounded."""
    cut = cut_center(exact, dtype)
    rounded = getattr(torch, dtype)
    distances = [(got - each.to(rounded).double()).square().sum() for each in (exact, cut)]
    return cut if distances[1] < distances[0] else exact


class ErrorSums:
    """The sums of one operator's errors, block by block. N = rows, F = features, G = heads."""

    def __init__(self, features: int, heads: int, dtype: str, device: torch.device) -> None:
        """`heads`: the number of heads of the features; 1 if they are not features of heads."""
        self._dtype, self._heads = dtype, heads
        self._rows = 0
        # By feature: gap, error², error⁴, unit², gap·exact, exact², (error·exact)², rounding²,
        # (rounding·exact)²; gap is the distance to the correctly rounded output, and rounding the
        # error of that output.
        self._sums = torch.zeros(9, features, dtype=torch.float64, device=device)
        # By row: error², unit², error·exact, exact², unit⁴. Then, of the row's gains in each head:
        # the error² that they explain and, in units, the mean of gain², the mean of gain² by
        # chance, and the sum of the squares of the latter.
        self._by_row: list[torch.Tensor] = []
        # By row and head: gap·exact, exact², and the variance of the former by shared errors.
        self._by_head: list[torch.Tensor] = []
        self._numbers: list[np.ndarray] = []
        self._peak = 0.0
        self._correlated = CorrelatedErrors()

    def add(
        self,
        got: torch.Tensor,
        exact: torch.Tensor,
        variance: torch.Tensor,
        shared: torch.Tensor,
        number: np.ndarray,
    ) -> None:
        """Adds rows: the side's output, the exact output and the squared unit, float64 `[N, F]`
        each; `shared`, `[N, G]`, or `[N, 1]` for all heads: the variance of Σ error · exact over a
        head by errors that its features share; `number`: the row numbers, `[N]`."""
        error, rounded = got - exact, exact.to(getattr(torch, self._dtype)).double()
        gap, product = got - rounded, error * exact
        square, power, slope = error.square(), exact.square(), gap * exact
        parts = [gap, square, square.square(), variance, slope, power, product.square()]
        rounding = (rounded - exact).square()
        for total, part in zip(self._sums, (*parts, rounding, rounding * power), strict=True):
            total += part.sum(dim=0)
        self._correlated.add(error, exact, rounded, variance)
        of_rows = [t.sum(dim=1) for t in (square, variance, product, power, variance**2)]
        by_head = [t.reshape(len(t), self._heads, -1).sum(dim=-1) for t in (slope, power)]
        self._by_head.append(torch.stack([*by_head, shared.expand_as(by_head[0])]))
        of_rows += self._row_gains(error, variance, shared, exact, product, power)
        self._by_row.append(torch.stack(of_rows))
        self._numbers.append(number)
        unit = torch.maximum(variance, variance.mean(dim=1, keepdim=True))
        self._peak = max(self._peak, math.sqrt(_number((square / unit).max())))

    def _row_gains(
        self,
        error: torch.Tensor,
        variance: torch.Tensor,
        shared: torch.Tensor,
        exact: torch.Tensor,
        product: torch.Tensor,
        squares: torch.Tensor,
    ) -> list[torch.Tensor]:
        """Returns four sums over heads of each row's gain: the squared error that it explains, its
        square, its square by chance, and the square of the latter. Chance comes from the residual
        errors, which count as rounding at least because one large entry would hide it, and from
        errors that features share. `product`, `squares`: error · exact and exact²."""
        if error.shape[1] == self._heads:
            return [error.new_zeros(len(error))] * 4
        by_head = (len(error), self._heads, -1)
        parts = (error, variance, exact, product, squares)
        e, v, y, product, squares = (t.reshape(by_head) for t in parts)
        power, width = squares.sum(dim=-1), y.shape[-1]
        gain = product.sum(dim=-1) / power
        residual = (e - gain[..., None] * y).square_().mul_(width / (width - 1))
        by_chance = [(t * squares).sum(dim=-1) for t in (residual, v)]
        chance = (torch.maximum(*by_chance) + shared) / power.square()
        unit = self._gain_unit(v.sum(dim=-1), power).square() * self._heads
        terms = (gain**2 * power, gain**2 / unit, chance / unit, (chance / unit).square())
        return [t.where(power > 0, 0.0).sum(dim=1) for t in terms]

    def _gain_unit(self, variance: torch.Tensor, power: torch.Tensor) -> torch.Tensor:
        """The unit of a gain: the relative error of a rounding, or the relative error of these
        outputs if it is larger, because sums cancel or are rounded more than their result."""
        return (variance / power).sqrt().clamp(min=relative_unit(self._dtype))

    def errors(self, index: RowIndex) -> RoundingErrors:
        """Returns the errors in units of rounding; a statistic of a NaN is infinite."""
        unit = relative_unit(self._dtype)
        number, by_row = np.concatenate(self._numbers), torch.cat(self._by_row, dim=1)
        n, row_rms = len(number), (by_row[0] / by_row[1]).sqrt()
        highest, row = _largest(row_rms)
        weight = (LARGEST_ROW * by_row[1].median() / by_row[1]).clamp(max=1)
        correlated = self._correlated.factor
        row_gain = (by_row[6].sum() - correlated * by_row[7].sum()) / n
        by_chance = correlated * (2 * by_row[8].sum()).sqrt() / n
        weighted = by_row * weight
        gap, square, fourth, variance, product, power, products, rounding, others = self._sums
        # If a side rounds less than its dtype, its errors are small, but its gaps are not.
        products = torch.maximum(products, others)
        together = torch.cat(self._by_head, dim=1)
        rms = _number(_rms(weighted[0].sum(), weighted[1].sum(), (by_row[4] * weight**2).sum()))
        # The standard errors of a feature's statistics; they are at least those of its rounding.
        floor = rms**2 * variance / n
        squares = torch.maximum(square, rounding) / n
        deviation = torch.maximum(squares - (gap / n).square(), floor).div(n).sqrt()
        spread = torch.maximum(fourth / n - (square / n).square(), 2 * floor.square()).div(n).sqrt()
        scale = (torch.maximum(variance, rounding) / n).sqrt()
        feature_rms = (_beyond(square / n, spread, len(gap)) / scale.square()).clamp(min=0).sqrt()
        shift = _beyond(gap / n, deviation, len(gap)) / scale
        gain = _gain(product, power, products) / self._gain_unit(variance, power)
        of_feature = [_largest(x) for x in (feature_rms, shift, gain)]
        entries = correlated * products
        whole = _gain_of_rows(together.sum(dim=2, keepdim=True), entries.sum())
        whole = whole / self._gain_unit(variance.sum(), power.sum())
        of_heads = [t.reshape(self._heads, -1).sum(dim=1) for t in (entries, variance, power)]
        by_head = _gain_of_rows(together, of_heads[0]) / self._gain_unit(*of_heads[1:])
        if n < FEATURE_ROWS:
            of_feature = [(0.0 if math.isfinite(x) else x, at) for x, at in of_feature]
        head_gain, head = _largest(by_head)
        return RoundingErrors(
            rms=rms,
            gain=float(whole),
            row_gain=_number(_beyond(row_gain, by_chance).clamp(min=0).sqrt()),
            head_gain=head_gain if self._heads > 1 else 0.0,
            head=head if self._heads > 1 else 0,
            feature_rms=of_feature[0][0],
            feature_shift=of_feature[1][0],
            feature_gain=of_feature[2][0],
            feature=max(of_feature, key=lambda statistic: abs(statistic[0]))[1],
            row_rms=highest,
            row=index.locate(int(number[row])),
            peak=self._peak,
            unit=unit,
            features=len(gap),
            pattern=pattern(
                Totals(*weighted[:4].cpu().numpy()),
                Totals(*(t.cpu().numpy() for t in (square, variance, product, power))),
                RowLabels(number, index.token[number], index.position[number]),
                self._heads,
                (gap / n).cpu().numpy(),
                float(weighted[5].sum()),
            ),
        )


def _beyond(value: torch.Tensor, standard_error: torch.Tensor, candidates: int = 1) -> torch.Tensor:
    """The part of a value beyond chance, with its sign, if it is the largest of `candidates`
    values."""
    return value.sign() * (value.abs() - deviations(candidates) * standard_error).clamp(min=0)


def _rms(square: torch.Tensor, variance: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    """The rms of errors in units, from sums of error², unit² and unit⁴. Of a value above 1 only the
    part beyond chance counts."""
    mean = square / variance
    by_chance = (SQUARE_VARIANCE * squares).sqrt() / variance
    return torch.minimum(mean, 1 + _beyond(mean - 1, by_chance).clamp(min=0)).sqrt()


def _gain(product: torch.Tensor, power: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    """The part beyond chance of the error's regression on the exact output; 0 if that output is 0,
    and infinite if the regression is not finite."""
    gain = _beyond(product / power, products.sqrt() / power, product.numel())
    return _infinite(gain).where(power != 0, 0.0)


def _gain_of_rows(sums: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """The gain of each head, `[G]`, from sums of each row `[3, N, G]`: gap · exact, exact², and
    the variance of the former by shared errors. Its standard error is that of independent rows,
    whose features may have common errors, and at least that of independent entries, whose
    Σ (error · exact)² is `entries`, `[G]`."""
    product, power, shared = sums
    rows, total = len(product), power.sum(dim=0)
    gain = product.sum(dim=0) / total
    left = (product - gain * power).square().sum(dim=0) * (rows / max(1, rows - 1))
    squares = torch.maximum(left, torch.maximum(shared.sum(dim=0), entries))
    return _gain(product.sum(dim=0), total, squares)


def _largest(values: torch.Tensor) -> tuple[float, int]:
    """The value of the largest magnitude, and its index; a NaN counts as infinite."""
    at = int(_infinite(values.abs()).argmax())
    return _number(values[at]), at


def _infinite(values: torch.Tensor) -> torch.Tensor:
    """Replaces values that are not finite by infinity, which exceeds every budget."""
    return values.where(values.isfinite(), math.inf)


def _number(value: torch.Tensor) -> float:
    return float(_infinite(value))
