"""Two comparisons of the same thing, an earlier and a later one: what became worse?"""

from collections.abc import Iterator

from rlk_align.errors import BadOption
from rlk_align.judge.contract import Contract, Regression
from rlk_align.results import Comparison, EdgeResult, Result, SideName


class RegressionCheck(Result):
    """One figure of the later run, held against the earlier one."""

    limit: str
    metric: str
    before: float
    after: float
    allowed: float
    edge: str
    site: str | None
    side: str | None = None

    @property
    def holds(self) -> bool:
        """False for a NaN."""
        return self.after <= self.allowed


def regressions(before: Comparison, after: Comparison, contract: Contract) -> list[RegressionCheck]:
    """Every regression limit on every judged edge. Raises BadOption for runs that cannot be held
    against each other, or a contract that has no such limit."""
    if not contract.regressions:
        raise BadOption(
            f"contract {contract.id} has no regression limits",
            "add [[regressions]], or name another with --contract",
        )
    _check_comparable(before, after)
    earlier = {e.name: e for e in before.edges}
    found: list[RegressionCheck] = []
    for edge in after.edges:
        if edge.name in after.judged:
            for limit in contract.regressions:
                found += _checks(limit, earlier[edge.name], edge, before, after)
    return found


def _check_comparable(before: Comparison, after: Comparison) -> None:
    for name, run in (("first", before), ("second", after)):
        if run.stopped:
            raise BadOption(f"the {name} run stopped at the precheck: it has no figures")
    told = {
        "dtype": (before.dtype, after.dtype),
        "engines": tuple(" and ".join(e.name for e in c.engines.values()) for c in (before, after)),
        "judged edges": tuple(", ".join(sorted(c.judged)) for c in (before, after)),
        "sites": tuple(f"{len(_sites(c))} sites" for c in (before, after)),
    }
    for what, (old, new) in told.items():
        if old != new:
            raise BadOption(
                f"the two runs have other {what}: {old}, and {new}",
                "compare runs of the same engines and the same model",
            )


def _sites(c: Comparison) -> set[tuple[str, str]]:
    return {(e.name, s.site) for e in c.edges for s in e.sites}


def _checks(
    limit: Regression, old: EdgeResult, new: EdgeResult, before: Comparison, after: Comparison
) -> Iterator[RegressionCheck]:
    for site, side, was, is_now in _figures(limit, old, new, before, after):
        yield RegressionCheck(
            limit=limit.id,
            metric=limit.metric,
            before=was,
            after=is_now,
            allowed=limit.factor * was + limit.plus,
            edge=new.name,
            site=site,
            side=side,
        )


Figure = tuple[str | None, SideName | None, float, float]
"""(site, side, before, after)."""


def _figures(
    limit: Regression, old: EdgeResult, new: EdgeResult, before: Comparison, after: Comparison
) -> Iterator[Figure]:
    """Counts as shares: the runs may have sampled other numbers of tokens."""
    if limit.metric == "rows_differ":
        earlier_sites = {s.site: s for s in old.sites}
        for site in new.sites:
            earlier = earlier_sites[site.site]
            yield (
                site.site,
                None,
                _share(earlier.differ, earlier.rows),
                _share(site.differ, site.rows),
            )
    elif limit.metric == "rounding_rms":
        known = {(u.side, u.passname, u.site): u.errors for u in before.referee}
        for unit in after.referee:
            errors = known.get((unit.side, unit.passname, unit.site))
            if unit.errors is not None and errors is not None and new.name in unit.edges:
                yield unit.site, unit.side, errors.rms, unit.errors.rms
    elif limit.metric == "bit_mismatches":
        was_share, share = (_share(m.bit_mismatches, m.tokens) for m in (old.metrics, new.metrics))
        yield None, None, was_share, share
    else:
        was_figure, figure = (float(getattr(m, limit.metric)) for m in (old.metrics, new.metrics))
        yield None, None, was_figure, figure


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
