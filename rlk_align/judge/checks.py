"""Checks every limit of a contract on every value that it applies to."""

import math
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, Literal

from rlk_align.errors import ContractError
from rlk_align.judge.budgets import bounds_of, budget_of
from rlk_align.judge.contract import LAW_METRICS, STATISTICS, Contract, Limit, Waiver
from rlk_align.model.operators import OPERATORS
from rlk_align.noise import excess
from rlk_align.results import (
    Comparison,
    Distribution,
    EdgeMetrics,
    EdgeResult,
    Quantisation,
    RefereedUnit,
    Result,
    SideName,
    SiteResult,
)

Outcome = Literal["pass", "warn", "waived", "alike", "fail"]


class LimitCheck(Result):
    """One limit, checked on one value."""

    limit: str
    metric: str
    value: float
    low: float | None = None
    """The low end of the value's interval, which is compared with the limit; None for a value
    without an interval."""
    warn: float | None = None
    fail: float
    site: str | None
    op_class: str | None = None
    edge: str
    side: SideName | None = None
    passname: str | None = None
    """For a budget: the side and the pass of the operator."""
    waiver: Waiver | None = None
    """The waiver that excuses the breach; None without one."""
    alike: bool = False
    """Whether both sides exceed the same budget by little, and by about the same factor."""

    @property
    def size(self) -> float:
        """The magnitude that is compared with the limit; NaN for a NaN."""
        return abs(self.value if self.low is None or math.isnan(self.value) else self.low)

    @property
    def holds(self) -> bool:
        """False for a NaN."""
        return self.size <= self.fail

    @property
    def outcome(self) -> Outcome:
        if not self.holds:
            return "waived" if self.waiver else "alike" if self.alike else "fail"
        return "pass" if self.warn is None or self.size <= self.warn else "warn"

    @property
    def excess(self) -> float:
        """The value divided by its limit: above 1 in breach; infinite for a NaN, and for a value
        above a limit of 0."""
        size = self.size
        ratio = size / self.fail if self.fail else (math.inf if size else 0.0)
        return math.inf if math.isnan(ratio) else ratio


def judged_metrics(edge: EdgeResult, c: Comparison, contract: Contract) -> EdgeMetrics:
    """Returns the metrics of an edge to which a contract's limits on log-probs apply.

    In a sparse model these are the metrics of the tokens that both sides send to the same experts:
    a different expert computes something else, and moves a log-prob by an amount that says nothing
    about drift. This requires that the choices are known to be correct: the contract has a budget
    for them, and each side's choices were checked against its own logits. Where they were not, or
    where too few tokens remain, all tokens count.
    """
    routing = edge.routing
    if routing is None or routing.unflipped is None or not contract.budget("experts", "routing"):
        return edge.metrics
    choices = [u for u in c.referee if u.op == "experts" and edge.name in u.edges]
    checked = bool(choices) and all(u.errors is not None for u in choices)
    enough = routing.unflipped.tokens >= contract.min_tokens
    return routing.unflipped if checked and enough else edge.metrics


def check_edge(edge: EdgeResult, c: Comparison, contract: Contract) -> list[LimitCheck]:
    """Checks every limit and budget of the contract on an edge. Raises ContractError where a limit
    names sites that the edge lacks, or where the contract limits some of its operators but not
    all."""
    metrics = judged_metrics(edge, c, contract)
    limits = [x for x in limits_of(edge, c, contract) if applies(x, edge, metrics, contract)]
    _check_covered(edge, limits, contract)
    of_operators = _of_operators(edge, c, contract)
    other = quantised_operators(edge, c)
    of_edge = _of_edge(edge, metrics, limits, _refereed(edge, c, contract), other)
    return [*of_edge, *of_operators, *_of_routers(edge, contract)]


def applies(limit: Limit, edge: EdgeResult, metrics: EdgeMetrics, contract: Contract) -> bool:
    """Whether a limit applies to an edge with these metrics of tokens. A limit on distributions
    needs as many positions with logits as a contract needs tokens."""
    count = judged_count(limit, edge, metrics)
    enough = not limit.of_distribution or count >= contract.min_tokens
    return enough and limit.judges(edge.name, count)


def judged_count(limit: Limit, edge: EdgeResult, metrics: EdgeMetrics) -> int:
    """Returns the number of tokens that a limit judges, or of positions with logits."""
    if not limit.of_distribution:
        return metrics.tokens
    return edge.distribution.positions if edge.distribution is not None else 0


def limits_of(edge: EdgeResult, c: Comparison, contract: Contract) -> list[Limit]:
    """Returns the limits that apply to an edge. Between sides whose weights differ because some are
    quantised, these are the limits on log-probs for that format."""
    return contract.limits_for(c.dtype, quantised_between(edge, c))


_PRODUCTS = frozenset(
    o.site for o in OPERATORS.values() if o.formula in ("linear", "expert_linear")
) - {"logits"}
"""The operators whose weights and inputs may be quantised."""


def quantised_between(edge: EdgeResult, c: Comparison) -> list[Quantisation]:
    """Returns what is quantised otherwise at the ends of an edge, by its format. The passes of one
    side have the same weights; but a grid of e4m3 makes large what differs a little before it."""
    if edge.name == "decode_vs_prefill":
        return [f for f in c.quantised.get("rollout", []) if f in ("fp8-activations", "fp8-cache")]
    return sorted({*chain(*c.quantised.values())})


def quantised_operators(edge: EdgeResult, c: Comparison) -> frozenset[str]:
    """Returns the operators that differ between the ends of an edge by quantisation."""
    formats = quantised_between(edge, c)
    of_cache = frozenset({"attn"} if "fp8-cache" in formats else ())
    return of_cache | (_PRODUCTS if set(formats) - {"fp8-cache"} else frozenset())


def _refereed(edge: EdgeResult, c: Comparison, contract: Contract) -> set[str]:
    """Returns the sites whose operator has a budget and was recomputed in each pass of an edge. The
    set is empty where the user allowed a mismatch: each side may then be true to its own
    checkpoint, and still be far from the other."""
    if any(m.stops for m in c.mismatches):
        return set()
    units = [u for u in c.referee if edge.name in u.edges]
    judged = {u.site for u in units if u.errors is not None and budget_of(contract, u)}
    return judged - {u.site for u in units if u.errors is None}


def _check_covered(edge: EdgeResult, limits: list[Limit], contract: Contract) -> None:
    known = [*(s.site for s in edge.sites), *(site for site, _, _ in edge.unpaired)]
    for limit in limits:
        for pattern in limit.sites or ():
            if not any(fnmatchcase(site, pattern) for site in known):
                raise ContractError(
                    f"contract {contract.id}: limit {limit.id!r} names {pattern}, and "
                    f"{edge.name} has no such site",
                    "correct the pattern, or remove it",
                )
    check_operators(contract, limits, [(s.site, s.op, s.op_class) for s in edge.sites])


def check_operators(
    contract: Contract, limits: Iterable[Limit], operators: Iterable[tuple[str, str, str]]
) -> None:
    """Raises ContractError where the contract limits some operators, but not each of these:
    (site, operator, class)."""
    for site, missing in contract.uncovered(limits, operators):
        raise ContractError(
            f"contract {contract.id} limits operators, but has no limit for {site}",
            f"add {missing}",
        )


def _of_edge(
    edge: EdgeResult,
    metrics: EdgeMetrics,
    limits: list[Limit],
    refereed: set[str],
    other_weights: frozenset[str],
) -> Iterator[LimitCheck]:
    """`refereed`: the sites that budgets judge on both sides; `other_weights`: the operators that
    have other weights on the two sides, whose outputs differ where their inputs are equal."""
    for site in edge.sites:
        value = float(site.nonfinite)
        yield _of_site(site, edge, limit="finite", metric="nonfinite", value=value, fail=0.0)
    for limit in limits:
        fail = limit.fail if limit.of_site else limit.fail_at(metrics.tokens)
        warn = None if limit.warn is None else min(limit.warn, fail)
        bounds: dict[str, Any] = {
            "limit": limit.id,
            "metric": limit.metric,
            "warn": warn,
            "fail": fail,
        }
        if limit.of_site:
            for site in edge.sites:
                if limit.unrefereed and site.site in refereed:
                    continue
                if limit.metric == "op_error" and site.op in other_weights:
                    continue
                if limit.covers(site.site, site.op_class):
                    yield _of_site(site, edge, value=_site_value(limit, site), **bounds)
        else:
            value, low = edge_value(limit, metrics, edge.distribution)
            yield LimitCheck(value=value, low=low, site=None, edge=edge.name, **bounds)


def edge_value(
    limit: Limit, metrics: EdgeMetrics, distribution: Distribution | None
) -> tuple[float, float | None]:
    """Returns the value of a limit's metric, and the low end of its interval where it has one. With
    too few sequences for an interval, the low end of c is c itself, and that of the mean ratio's
    bias is 0."""
    if limit.of_distribution:
        return _distribution_value(limit, distribution), None
    if limit.metric not in LAW_METRICS:
        return float(getattr(metrics, limit.metric)), None
    noise = metrics.noise
    if noise is None:
        return math.nan, None
    if limit.metric == "noise_c":
        return noise.c, _or(noise.c_low, noise.c)
    if limit.metric == "ratio_bias":
        value = metrics.ratio_mean_error
        return value, _or(max(noise.ratio_low - 1, 1 - noise.ratio_high, 0.0), 0.0)
    assert limit.floor is not None
    return excess(noise.largest, noise.c, limit.floor), None


def _distribution_value(limit: Limit, distribution: Distribution | None) -> float:
    if distribution is None:
        return math.nan
    if limit.metric == "token_excess":
        assert limit.floor is not None
        return excess(distribution.worst_token, distribution.typical_token, limit.floor)
    return float(getattr(distribution, limit.metric.removeprefix("vocabulary_")))


def _or(low: float, value: float) -> float:
    return value if math.isnan(low) else low


def _of_site(site: SiteResult | RefereedUnit, edge: EdgeResult, **check: Any) -> LimitCheck:
    return LimitCheck(site=site.site, op_class=site.op_class, edge=edge.name, **check)


def _of_operators(edge: EdgeResult, c: Comparison, contract: Contract) -> Iterator[LimitCheck]:
    """Yields one check for each side of each operator whose outputs differ, or that only one side
    shows: that of the statistic which uses most of its budget."""
    equal = {s.site for s in edge.sites if not s.differ}
    for unit in c.referee:
        budget, bounds = budget_of(contract, unit), bounds_of(contract, unit)
        if budget is None or bounds is None or unit.errors is None or edge.name not in unit.edges:
            continue
        if unit.site not in equal:
            checks = [
                _of_site(
                    unit,
                    edge,
                    limit=budget.id,
                    metric=f"rounding_{name}",
                    value=getattr(unit.errors, name),
                    warn=None if budget.warn is None else budget.warn * bounds[name],
                    fail=bounds[name],
                    side=unit.side,
                    passname=unit.passname,
                )
                for name in STATISTICS
            ]
            yield max(checks, key=lambda check: (not check.holds, check.excess))


def mark_alike(checks: list[LimitCheck], contract: Contract) -> list[LimitCheck]:
    """Marks the checks in which both sides exceed an operator's budget by little, and by about the
    same factor: then the unit of the budget is more likely wrong than both sides."""
    alike = contract.alike
    if alike is None:
        return checks
    exceeded: dict[tuple[str | None, str], list[LimitCheck]] = {}
    for check in checks:
        if check.side is not None and not check.holds:
            exceeded.setdefault((check.site, check.metric), []).append(check)
    marked = {
        site
        for (site, _), of_site in exceeded.items()
        if len({check.side for check in of_site}) > 1
        and max(check.excess for check in of_site) < alike.within
        and max(c.size for c in of_site) <= alike.apart * min(c.size for c in of_site)
    }
    return [
        check.model_copy(update={"alike": True})
        if check.site in marked and check.side is not None and check.excess < alike.within
        else check
        for check in checks
    ]


def _of_routers(edge: EdgeResult, contract: Contract) -> Iterator[LimitCheck]:
    """Yields for each router with equal inputs by how many roundings the sides prefer different
    experts."""
    for layer in edge.routing.layers if edge.routing else ():
        budget = contract.budget("experts", "routing")
        if layer.measured > layer.ties and budget is not None:
            yield LimitCheck(
                limit=budget.id,
                metric="routing_gap",
                value=layer.largest_gap,
                fail=budget.peak,
                site=layer.site,
                op_class="routing",
                edge=edge.name,
            )


def _site_value(limit: Limit, site: SiteResult) -> float:
    if limit.metric == "rows_differ":
        return float(site.differ)
    assert limit.atol is not None
    assert limit.rtol is not None
    return tolerance_ratio(site.frontier, limit.atol, limit.rtol)


def tolerance_ratio(frontier: list[tuple[float, float]], atol: float, rtol: float) -> float:
    """Returns the largest error / (atol + rtol * magnitude): at most 1 where all errors are
    tolerated."""
    ratios = [
        error / bound if (bound := atol + rtol * magnitude) else math.inf
        for magnitude, error in frontier
    ]
    return max(ratios, default=0.0)
