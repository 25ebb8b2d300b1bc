"""Joins the results for each operator of an edge, as the data of charts and tables."""

from collections import defaultdict
from dataclasses import dataclass

from rlk_align.judge.checks import LimitCheck
from rlk_align.judge.verdict import OverBudget, over_budget
from rlk_align.probe.attribution_record import Contribution
from rlk_align.probe.record import ProbedEdge
from rlk_align.probe.unit_record import Split, Unit
from rlk_align.report.probe_units import contributions
from rlk_align.report.source import ReportSource
from rlk_align.report.words import how_words, whose_off
from rlk_align.results import EdgeResult, RefereedUnit, SiteResult

STATES = {
    "over": ("✕", "beyond its budget"),
    "waived": ("○", "beyond its budget, waived"),
    "near": ("!", "near its budget"),
    "introducer": ("◆", "introduces"),
    "differs": ("~", "inherits"),
    "equal": ("=", "bit-equal"),
    "missing": ("–", "not compared"),
}
"""State -> its sign, which accompanies its colour, and its meaning."""


@dataclass(frozen=True, kw_only=True)
class OperatorFacts:
    """One site of an edge."""

    order: int
    """The site's position in execution order, from 1."""
    site: SiteResult
    unit: Unit | None
    """The probe's unit with this site; None where the run was not probed."""
    split: Split | None
    """The introduced and the inherited error; None where they were not determined."""
    over: OverBudget | None
    contribution: Contribution | None
    refereed: list[RefereedUnit]
    worst: LimitCheck | None
    """The check that comes closest to its limit."""
    how: list[str]
    """A description of its error for each side and pass."""

    @property
    def mean(self) -> float | None:
        """Mean relative L2 of the rows that differ; 0 where no row differs."""
        return self._known(self.site.mean_rel_l2)

    @property
    def largest(self) -> float | None:
        return self._known(self.site.max_rel_l2)

    def _known(self, value: float) -> float | None:
        s = self.site
        return value if s.valued_rows or (s.rows and not s.differ) else None

    @property
    def introduced(self) -> float | None:
        return self.split.introduced.rel_l2 if self.split else None

    @property
    def inherited(self) -> float | None:
        return self.split.inherited.rel_l2 if self.split else None

    @property
    def introduces(self) -> bool:
        """Whether it is proven to introduce a difference: by the probe, or by rows whose inputs are
        bit-equal. In a region, it is proven for the operators whose own outputs show it."""
        if self.unit is None:
            return self.site.introduced > 0
        splits = [s for o in self.unit.orders for s in o.splits if s.site == self.site.site]
        # A NaN is not 0, so it counts as introduced.
        return self.unit.label == "introducer" and any(s.introduced.max_abs != 0 for s in splits)

    @property
    def state(self) -> str:
        """The operator's state, a key of STATES."""
        if not self.site.rows:
            return "missing"
        outcome = self.worst.outcome if self.worst else "pass"
        if self.over or outcome == "fail":
            return "over"
        if outcome == "waived":
            return "waived"
        if outcome == "warn":
            return "near"
        if self.introduces:
            return "introducer"
        return "differs" if self.site.differ else "equal"

    @property
    def side(self) -> str:
        return whose_off(self.over) if self.over else ""

    @property
    def summary(self) -> str:
        """A summary in one line, for a tooltip and for a screen reader."""
        parts = [f"{self.site.site}: {STATES[self.state][1]}"]
        if self.largest is not None:
            parts.append(f"relative L2 mean {self.mean:.2g}, largest {self.largest:.2g}")
        elif self.site.differ:
            parts.append(f"{self.site.differ:,} rows differ, values not kept")
        if self.introduced is not None:
            parts.append(f"introduced {self.introduced:.2g}, inherited {self.inherited:.2g}")
        return "; ".join(filter(None, [*parts, self.side]))


def operator_facts(source: ReportSource, edge: EdgeResult) -> list[OperatorFacts]:
    """Returns the facts of each operator of an edge, in execution order."""
    verdict, probed = source.verdict, probed_edge(source, edge)
    over = {o.unit.site: o for o in over_budget(verdict, edge)}
    units = {site: u for u in (probed.units if probed else []) for site in u.sites}
    parts = contributions(probed.attribution if probed else None)
    checks = defaultdict(list)
    for check in verdict.checks:
        if check.edge == edge.name:
            checks[check.site].append(check)
    refereed = defaultdict(list)
    for unit in verdict.comparison.referee:
        if edge.name in unit.edges:
            refereed[unit.site].append(unit)
    return [
        OperatorFacts(
            order=order,
            site=site,
            unit=units.get(site.site),
            split=_split(units.get(site.site), site.site),
            over=over.get(site.site),
            contribution=parts.get(site.site),
            refereed=refereed[site.site],
            worst=max(checks[site.site], key=_severity, default=None),
            how=[": ".join(w) for w in how_words(verdict, over[site.site])]
            if site.site in over
            else [],
        )
        for order, site in enumerate(edge.sites, 1)
    ]


def _severity(check: LimitCheck) -> tuple[int, float]:
    return ("pass", "warn", "waived", "fail").index(check.outcome), check.excess


def _split(unit: Unit | None, site: str) -> Split | None:
    """Returns the split of a site in the first graft order that determined one."""
    splits = [s for o in (unit.orders if unit else []) for s in o.splits if s.site == site]
    return splits[0] if splits else None


def probed_edge(source: ReportSource, edge: EdgeResult) -> ProbedEdge | None:
    """Returns the probe's record of an edge; None if the edge was not probed."""
    return source.probe.edge(edge.name) if source.probe else None
