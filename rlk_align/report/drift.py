"""The distance of the two sides by operator: the data of the drift charts of the page and the
slides."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from rlk_align.judge.budgets import budget_of
from rlk_align.judge.contract import Contract
from rlk_align.report.operator_facts import OperatorFacts, operator_facts
from rlk_align.report.source import ReportSource
from rlk_align.results import EdgeResult, SiteResult

_NAMED = 100
"""The most operators that are named below the axis; more names would not be readable."""


@dataclass(frozen=True, kw_only=True)
class DriftSeries:
    """One run's operators on one edge, in execution order."""

    label: str
    operators: list[OperatorFacts]
    """The operators except the log-prob, whose error is not a relative L2 of a state."""
    contract: Contract

    def allowed(self, operator: OperatorFacts) -> float | None:
        """Returns the relative L2 that the contract allows the operator to introduce: the sum of
        the rms budgets of both sides; None where no budget was applied to the operator."""
        allowed = {}
        for unit in operator.refereed:
            budget = budget_of(self.contract, unit)
            if unit.errors is not None and budget is not None:
                allowed[unit.side] = budget.rms * unit.errors.unit
        return sum(allowed.values()) if allowed else None

    @property
    def rounding(self) -> float | None:
        """The relative size of one rounding of the run's dtype."""
        units = [u.errors.unit for o in self.operators for u in o.refereed if u.errors]
        return max(units, default=None)


def drift_series(source: ReportSource, edge: EdgeResult, label: str | None = None) -> DriftSeries:
    """Returns the drift of a run on an edge; the default label is the run's name."""
    return DriftSeries(
        label=source.name if label is None else label,
        operators=[o for o in operator_facts(source, edge) if o.site.op != "logprob"],
        contract=source.verdict.contract,
    )


class DriftAxis:
    """The sites along the common axis of several series."""

    def __init__(self, series: Sequence[DriftSeries]) -> None:
        # The run with most sites comes first: the layers of a deeper model keep their order.
        longest = sorted(series, key=lambda s: -len(s.operators))
        sites = {o.site.site: o.site for s in longest for o in s.operators}
        self.sites: list[SiteResult] = list(sites.values())
        self.at = {site: n for n, site in enumerate(sites)}
        self.named = len(sites) <= _NAMED

    def values(self, series: DriftSeries, kind: Literal["mean", "largest"]) -> list[float | None]:
        """Returns a value for each site; None where the series lacks the site, so that its line is
        broken there."""
        known = {o.site.site: getattr(o, kind) for o in series.operators}
        return [known.get(site) for site in self.at]

    def layers(self) -> list[tuple[int, int, int]]:
        """Returns (layer, index of its first site, number of its sites) for each layer."""
        spans, first = [], 0
        for layer, group in groupby(self.sites, key=lambda s: s.layer):
            count = len(list(group))
            if layer is not None:
                spans.append((layer, first, count))
            first += count
        return spans
