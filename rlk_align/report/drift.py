"""How far the two sides are apart, operator by operator: what the page and the slides draw."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from rlk_align.judge.budgets import budget_of
from rlk_align.judge.contract import Contract
from rlk_align.report.facts import OperatorFacts, operator_facts
from rlk_align.report.source import ReportSource
from rlk_align.results import EdgeResult, SiteResult

_NAMED = 100
"""Operators that are named below the axis; more would not be readable."""


@dataclass(frozen=True, kw_only=True)
class DriftSeries:
    """One run's operators on one edge, in execution order."""

    label: str
    operators: list[OperatorFacts]
    """The operators without the log-probs, whose errors are not a relative L2 of a state."""
    contract: Contract

    def allowed(self, operator: OperatorFacts) -> float | None:
        """What the contract lets the operator introduce, as relative L2: the rms budgets of both
        sides, in units of rounding, added up; None where it was not compared with a budget."""
        allowed = {}
        for unit in operator.refereed:
            budget = budget_of(self.contract, unit)
            if unit.errors is not None and budget is not None:
                allowed[unit.side] = budget.rms * unit.errors.unit
        return sum(allowed.values()) if allowed else None

    @property
    def rounding(self) -> float | None:
        """One rounding of the run's dtype, relative."""
        units = [u.errors.unit for o in self.operators for u in o.refereed if u.errors]
        return max(units, default=None)


def drift_series(source: ReportSource, edge: EdgeResult, label: str | None = None) -> DriftSeries:
    """The drift of a run on an edge; the label is by default the run's name."""
    return DriftSeries(
        label=source.name if label is None else label,
        operators=[o for o in operator_facts(source, edge) if o.site.op != "logprob"],
        contract=source.verdict.contract,
    )


class DriftAxis:
    """The sites along the axis that several series share."""

    def __init__(self, series: Sequence[DriftSeries]) -> None:
        # The order of the run with most sites, so that a deeper model's layers stay in theirs.
        longest = sorted(series, key=lambda s: -len(s.operators))
        sites = {o.site.site: o.site for s in longest for o in s.operators}
        self.sites: list[SiteResult] = list(sites.values())
        self.at = {site: n for n, site in enumerate(sites)}
        self.named = len(sites) <= _NAMED

    def values(self, series: DriftSeries, kind: Literal["mean", "largest"]) -> list[float | None]:
        """A value for each site, None where the series lacks it: a line that leaps over the site
        would say too much."""
        known = {o.site.site: getattr(o, kind) for o in series.operators}
        return [known.get(site) for site in self.at]

    def layers(self) -> list[tuple[int, int, int]]:
        """(layer, place of its first site, number of its sites), without sites of no layer."""
        spans, first = [], 0
        for layer, group in groupby(self.sites, key=lambda s: s.layer):
            count = len(list(group))
            if layer is not None:
                spans.append((layer, first, count))
            first += count
        return spans
