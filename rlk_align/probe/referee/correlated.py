"""The correlation of the rounding errors of a row's features.

Features of nearly equal value, such as the logits of tokens that were never trained, are rounded to
the same number and have the same error. The variance of a sum over features is then larger than the
sum of their variances. N = rows, F = features, C = groups of features.
"""

import torch

ROWS = 32
"""The number of rows of an operator that the correlation is estimated from."""
ENTRIES = 1 << 18
"""The largest number of entries in these rows."""


class CorrelatedErrors:
    """Estimates by which factor the variance of a row's Σ error · exact exceeds that of independent
    errors. The estimate is the cluster-robust variance (Liang and Zeger 1986) over groups of
    features that round to the same number, in the first rows that are added."""

    def __init__(self) -> None:
        self._rows = 0
        self._grouped = self._single = 0.0

    def add(
        self,
        error: torch.Tensor,
        exact: torch.Tensor,
        rounded: torch.Tensor,
        variance: torch.Tensor,
    ) -> None:
        """Adds rows, float64 `[N, F]` each: the error, the exact output, the exact output rounded
        to the dtype, and the squared unit."""
        rows = min(ROWS - self._rows, len(error), max(1, ENTRIES // error.shape[1]))
        if rows <= 0 or error.shape[1] < 2:
            return
        self._rows += rows
        error, y, rounded, variance = (t[:rows] for t in (error, exact, rounded, variance))
        power = y.square().sum(dim=1, keepdim=True)
        gain = (error * y).sum(dim=1, keepdim=True) / power
        # A gain of the whole row is systematic, not random.
        left = (error - gain * y) * y / power
        unit = variance * (y / power).square()
        values, order = rounded.sort(dim=1)
        starts = torch.ones_like(values, dtype=torch.bool)
        starts[:, 1:] = values[:, 1:] != values[:, :-1]
        group = starts.cumsum(dim=1) - 1

        def by_group(x: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(x).scatter_add_(1, group, x.gather(1, order))

        count = by_group(torch.ones_like(y)).clamp(min=1)
        together = _together(by_group(y), by_group(y.square()), by_group(variance), count)
        units = by_group(unit) * (1 + (count - 1) * together)
        grouped = torch.maximum(by_group(left).square().sum(dim=1), units.sum(dim=1))
        single = torch.maximum(left.square().sum(dim=1), unit.sum(dim=1))
        known = grouped.isfinite() & single.isfinite()
        self._grouped += float(grouped[known].sum())
        self._single += float(single[known].sum())

    @property
    def factor(self) -> float:
        """The factor: 1 for independent errors, and never less."""
        return max(1.0, self._grouped / self._single) if self._single else 1.0


def _together(
    total: torch.Tensor, squares: torch.Tensor, variance: torch.Tensor, count: torch.Tensor
) -> torch.Tensor:
    """The correlation of the errors within each group, from 0 to 1: 1 if the exact outputs are
    equal, and 0 if they are spread over their rounding interval. `total`, `squares` and `variance`
    are sums over each group `[N, C]` of the exact outputs, their squares and the squared units."""
    within = (squares - total.square() / count) / (count - 1).clamp(min=1)
    # Three standard errors of the variance of `count` numbers that are uniform over an interval.
    most = within * (1 + 3 * (0.8 / count).sqrt())
    return (1 - most * count / variance).clamp(0, 1).nan_to_num(0.0)
