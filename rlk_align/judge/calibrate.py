"""Proposes limits from healthy runs: many seeds of each pair of engines, without planted faults.

The largest healthy value of a metric, times `MARGIN`, is proposed as its `fail`, and the largest
value itself as its `warn`. The largest |Δ| of a run grows with its tokens, so that limit has a
tail: the 99th percentile over all tokens of an edge, and the mean excess above it (peaks over a
threshold), or a larger excess where the largest |Δ| shows a heavier tail.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import tomli_w

from rlk_align.errors import BadOption
from rlk_align.judge.budgets import budget_of
from rlk_align.judge.chance import by_width
from rlk_align.judge.checks import applies, edge_value
from rlk_align.judge.contract import STATISTICS, Budget, Contract, Limit, Tail
from rlk_align.judge.verdict import doubts_of
from rlk_align.results import Comparison, EdgeName, RefereedUnit

MARGIN = 1.5
"""A factor that leaves room for models and machines that were not measured."""
MIN_RUNS, MIN_RUNS_OF_A_PAIR, MIN_TOKENS = 10, 5, 5000
QUANTILE, CHANCE = 0.99, 1e-3


@dataclass(frozen=True, slots=True)
class HealthyRun:
    """A compared run without a fault."""

    name: str
    comparison: Comparison
    shifts: dict[EdgeName, np.ndarray]
    """|Δ| of every sampled token, float64 `[N]`, by edge."""

    @property
    def pair(self) -> str:
        """Names its two engines, with their options."""
        return " against ".join(
            ":".join(filter(None, [e.name, ",".join(f"{k}={v}" for k, v in e.options.items())]))
            for e in self.comparison.engines.values()
        )


@dataclass(frozen=True, slots=True)
class Proposed:
    """A number of the contract: its present value, and the value that the runs suggest."""

    entry: str
    what: str
    now: float
    healthy: float
    """The largest value in healthy runs."""
    proposed: float


@dataclass(slots=True)
class Proposal:
    """A contract with new limits."""

    figures: list[Proposed]
    source: str
    contract: dict = field(default_factory=dict)

    @property
    def toml(self) -> str:
        return tomli_w.dumps(self.contract)


def calibrated(runs: Sequence[HealthyRun], base: Contract) -> Proposal:
    """Returns the base contract with the limits that the runs suggest. Raises BadOption for too few
    runs, and for runs that are not healthy."""
    _check_enough(runs, base)
    source = _source(runs)
    proposal = Proposal([], source)
    limits = [_limit(x, runs, base, source, proposal.figures) for x in base.limits]
    budgets = [_budget(b, runs, base, source, proposal.figures) for b in base.budgets]
    head = base.model_dump(exclude_defaults=True, exclude={"limits", "budgets", "extends"})
    named = {"id": f"{base.id}-calibrated", "version": "1.0.0"}
    entries = {
        "limits": [x.model_dump(exclude_defaults=True) for x in limits],
        "budgets": [b.model_dump(exclude_defaults=True) for b in budgets],
    }
    proposal.contract = head | named | {k: v for k, v in entries.items() if v}
    return proposal


def _check_enough(runs: Sequence[HealthyRun], base: Contract) -> None:
    for run in runs:
        c = run.comparison
        if c.mismatches:
            raise BadOption(f"{run.name}: its sides differ before anything is computed")
        if c.dtype not in base.dtypes:
            raise BadOption(f"{run.name} is in {c.dtype}, and {base.id} does not cover that dtype")
        for doubt in doubts_of(c, base):
            raise BadOption(f"{run.name} is inconclusive: {doubt}")
        if any(s.nonfinite for e in c.edges for s in e.sites):
            raise BadOption(f"{run.name} has NaN or infinite values: it is not healthy")
    if len({(r.pair, *(x.tobytes() for x in r.shifts.values())) for r in runs}) < len(runs):
        raise BadOption("two of the runs are the same run", "give runs of other seeds")
    pairs = {run.pair for run in runs}
    few = [p for p in sorted(pairs) if sum(r.pair == p for r in runs) < MIN_RUNS_OF_A_PAIR]
    total = sum(r.comparison.tokens for r in runs)
    if len(runs) < MIN_RUNS or few or total < MIN_TOKENS:
        raise BadOption(
            f"{len(runs)} runs of {len(pairs)} pairs of engines, {total:,} sampled tokens: too "
            "few to distinguish a tail from chance",
            f"give {MIN_RUNS} runs and {MIN_TOKENS:,} tokens at least, with {MIN_RUNS_OF_A_PAIR} "
            "seeds of each pair of engines",
        )


def _source(runs: Sequence[HealthyRun]) -> str:
    total = sum(r.comparison.tokens for r in runs)
    pairs = sorted({run.pair for run in runs})
    versions = {f"{e.name} {e.version}": None for r in runs for e in r.comparison.engines.values()}
    return (
        f"measured: {len(runs)} healthy runs, {total:,} tokens: {'; '.join(pairs)} "
        f"({', '.join(versions)}), the largest value times {MARGIN:g}"
    )


def _limit(
    limit: Limit, runs: Sequence[HealthyRun], base: Contract, source: str, proposals: list[Proposed]
) -> Limit:
    if limit.of_site:
        return limit
    values = [
        edge_value(limit, e.metrics, e.distribution)[0]
        for r in runs
        for e in r.comparison.edges
        if applies(limit, e, e.metrics, base)
        and (limit.dtypes is None or r.comparison.dtype in limit.dtypes)
    ]
    largest = max(values, default=0.0)
    if not largest:
        return limit
    changes: dict = {"healthy": rounded_up(largest), "source": source}
    if limit.metric == "max_abs_dlogp":
        tail = fitted_tail(runs)
        tokens = max(r.comparison.tokens for r in runs)
        # No healthy token of a million may reach the bound.
        most = max(MARGIN * largest, tail.bound(1_000_000))
        changes |= {"tail": tail, "fail": max(limit.fail, rounded_up(most))}
        proposed = min(changes["fail"], tail.bound(tokens))
        proposals.append(
            Proposed(limit.id, f"of {tokens:,} tokens", limit.fail_at(tokens), largest, proposed)
        )
    elif limit.metric == "excess":
        # Its tail was fitted to many models; one pair of engines has too few tokens for that.
        return limit.model_copy(update=changes)
    else:
        changes["fail"] = rounded_up(MARGIN * largest)
        proposals.append(Proposed(limit.id, limit.metric, limit.fail, largest, changes["fail"]))
    changes["warn"] = min(changes["healthy"], changes["fail"])
    return limit.model_copy(update=changes)


def fitted_tail(runs: Sequence[HealthyRun]) -> Tail:
    """Fits a tail to each edge of each pair of engines, and returns the one that is the heaviest at
    a million tokens. A tail never lies below the largest value that was measured."""
    tails = []
    for pair, edge in sorted({(run.pair, edge) for run in runs for edge in run.shifts}):
        sizes = np.concatenate([r.shifts[edge] for r in runs if r.pair == pair])
        value = float(np.quantile(sizes, QUANTILE))
        above = sizes[sizes > value]
        if not len(above):
            continue
        # The mean excess; more where the largest value shows a heavier tail.
        spread = math.log(max(2.0, len(sizes) * (1 - QUANTILE)))
        scale = max(float(above.mean()) - value, (float(sizes.max()) - value) / spread)
        tails.append(
            Tail(
                quantile=QUANTILE,
                value=rounded_up(value),
                scale=rounded_up(max(scale, 1e-12)),
                chance=CHANCE,
            )
        )
    if not tails:
        raise BadOption("the runs are bit-equal: there is nothing to calibrate", "judge by bitwise")
    return max(tails, key=lambda t: t.bound(1_000_000))


def _budget(
    budget: Budget,
    runs: Sequence[HealthyRun],
    base: Contract,
    source: str,
    proposals: list[Proposed],
) -> Budget:
    units = [
        u
        for r in runs
        for u in r.comparison.referee
        if u.errors is not None and budget_of(base, u) is budget
    ]
    if not units:
        return budget
    changes: dict = {"source": source}
    for name in STATISTICS:
        largest = max(_as_measured(u, name, budget) for u in units)
        changes[name] = rounded_up(MARGIN * largest)
        proposals.append(Proposed(budget.id, name, getattr(budget, name), largest, changes[name]))
    return budget.model_copy(update=changes)


def _as_measured(unit: RefereedUnit, name: str, budget: Budget) -> float:
    """Returns the magnitude of a statistic, converted to the row width of the budget's bound."""
    assert unit.errors is not None
    size = abs(float(getattr(unit.errors, name)))
    if name == "row_rms" and budget.row_rms_by_width:
        return size / by_width(unit.errors.features, unit.rows)
    return size


def rounded_up(value: float) -> float:
    """Rounds up to two significant digits."""
    if not value or not math.isfinite(value):
        return value
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / step - 1e-9) * step:.2g}")


def proposal_lines(proposal: Proposal) -> Iterator[str]:
    """Yields the lines of a table of the proposed numbers, then their source."""
    yield f"{'limit':<22}{'of':<22}{'healthy':>10}{'now':>10}{'proposed':>10}"
    for p in proposal.figures:
        looser = "  looser" if p.proposed > p.now else ""
        figures = "".join(f"{x:>10.3g}" for x in (p.healthy, p.now, p.proposed))
        yield f"{p.entry:<22}{p.what:<22}{figures}{looser}"
    yield proposal.source
