"""Finds what became worse between an earlier and a later comparison of the same engines."""

from collections.abc import Iterator

from rlk_align.errors import BadOption
from rlk_align.judge.contract import Contract, Regression
from rlk_align.judge.verdict import EXIT_CODES, Status, doubts_of
from rlk_align.results import Comparison, EdgeResult, Result, SideName


class RegressionCheck(Result):
    """One figure of the later run, compared with the earlier one."""

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


class RegressionVerdict(Result):
    """The figures of two runs, checked by the regression limits of a contract."""

    contract: Contract
    checks: list[RegressionCheck]
    doubts: list[str]
    """Reasons for which nothing can be concluded."""

    @property
    def status(self) -> Status:
        """A doubt outweighs a figure that is worse."""
        if self.doubts:
            return "inconclusive"
        return "fail" if self.worse else "pass"

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.status]

    @property
    def worse(self) -> list[RegressionCheck]:
        """The figures beyond their bounds."""
        return [check for check in self.checks if not check.holds]


def judge_regression(
    before: Comparison, after: Comparison, contract: Contract
) -> RegressionVerdict:
    """Checks every regression limit on every judged edge. The verdict is inconclusive where either
    run alone is. Raises BadOption for runs that cannot be compared, and for a contract without
    regression limits."""
    if not contract.regressions:
        raise BadOption(
            f"contract {contract.id} has no regression limits",
            "add [[regressions]], or name another with --contract",
        )
    _check_comparable(before, after)
    doubts = [
        f"the {name} run: {doubt}"
        for name, run in (("first", before), ("second", after))
        for doubt in doubts_of(run, contract)
    ]
    checks: list[RegressionCheck] = []
    if not doubts:
        _check_alike(before, after)
        earlier = {e.name: e for e in before.edges}
        for edge in after.edges:
            if edge.name in after.judged:
                for limit in contract.regressions:
                    checks += _checks(limit, earlier[edge.name], edge, before, after)
    return RegressionVerdict(contract=contract, checks=checks, doubts=doubts)


def _check_comparable(before: Comparison, after: Comparison) -> None:
    compared = {
        "dtype": (before.dtype, after.dtype),
        "engines": tuple(" and ".join(e.name for e in c.engines.values()) for c in (before, after)),
        "judged edges": tuple(", ".join(sorted(c.judged)) for c in (before, after)),
    }
    for what, (old, new) in compared.items():
        if old != new:
            raise _other(what, old, new)


def _check_alike(before: Comparison, after: Comparison) -> None:
    """Raises BadOption where the runs compared different operators."""
    old, new = _sites(before), _sites(after)
    if old != new:
        (edge, site), *more = sorted(old ^ new)
        where = f"{site} on {edge}" + (f" and {len(more)} more" if more else "")
        there, missing = ("first", "second") if (edge, site) in old else ("second", "first")
        raise _other("sites", f"{where} in the {there} run", f"not in the {missing}")


def _other(what: str, old: str, new: str) -> BadOption:
    return BadOption(
        f"the two runs have different {what}: {old}; {new}",
        "compare runs of the same engines and the same model, made with the same options",
    )


def _sites(c: Comparison) -> set[tuple[str, str]]:
    return {(e.name, s.site) for e in c.edges if e.name in c.judged for s in e.sites}


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
    """Yields the figures of both runs. Counts become shares: the runs may have sampled different
    numbers of tokens."""
    if limit.metric == "rows_differ":
        earlier = {s.site: s for s in old.sites}
        for site in new.sites:
            was, is_now = (_share(s.differ, s.rows) for s in (earlier[site.site], site))
            yield site.site, None, was, is_now
    elif limit.metric == "rounding_rms":
        known = {(u.side, u.passname, u.site): u.errors for u in before.referee}
        for unit in after.referee:
            errors = known.get((unit.side, unit.passname, unit.site))
            if unit.errors is not None and errors is not None and new.name in unit.edges:
                yield unit.site, unit.side, errors.rms, unit.errors.rms
    elif limit.metric == "bit_mismatches":
        was, is_now = (_share(m.bit_mismatches, m.tokens) for m in (old.metrics, new.metrics))
        yield None, None, was, is_now
    else:
        was, is_now = (float(getattr(m, limit.metric)) for m in (old.metrics, new.metrics))
        yield None, None, was, is_now


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
