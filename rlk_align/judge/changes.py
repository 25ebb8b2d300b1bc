"""Compares what two contracts allow: for pull requests, and for `extends`."""

import math
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel

from rlk_align.judge.contract import STATISTICS, Budget, Contract, Limit, Regression
from rlk_align.results import Result

Kind = Literal["loosened", "tightened", "reworded"]


class Change(Result):
    """One difference between two contracts."""

    kind: Kind
    entry: str
    """The id of a limit, a budget, a regression or a waived limit; empty for the head."""
    what: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.what}: {self.before} → {self.after}"


def changes(before: Contract, after: Contract) -> list[Change]:
    """Lists all differences: the head first, then entry by entry. A difference that cannot be
    ordered (a site pattern, another metric) counts as looser, so that a person reviews it."""
    return [
        *_head(before, after),
        *_entries(before.limits, after.limits, _limit),
        *_entries(before.budgets, after.budgets, _budget),
        *_entries(before.regressions, after.regressions, _regression),
        *_waivers(before, after),
    ]


def needed_version(before: Contract, changed: list[Change]) -> str:
    """Returns the lowest version that a contract with these changes may have."""
    major, minor, patch = (int(x) for x in before.version.split("."))
    kinds = {c.kind for c in changed}
    if "loosened" in kinds:
        return f"{major + 1}.0.0"
    if "tightened" in kinds:
        return f"{major}.{minor + 1}.0"
    return f"{major}.{minor}.{patch + 1}" if changed else before.version


def version_is_enough(before: Contract, after: Contract, changed: list[Change]) -> bool:
    """Whether the later contract's version is high enough for the kind of its changes."""
    have, need = (
        [int(x) for x in v.split(".")] for v in (after.version, needed_version(before, changed))
    )
    return have >= need


def _head(before: Contract, after: Contract) -> Iterator[Change]:
    yield from _lower_is_looser("min_coverage", before.min_coverage, after.min_coverage)
    yield from _lower_is_looser("min_tokens", before.min_tokens, after.min_tokens)
    noise = [0.0 if c.max_noise is None else c.max_noise for c in (before, after)]
    yield from _higher_is_looser("", "max_noise", *noise)
    for dtype in before.dtypes:
        if dtype not in after.dtypes:
            yield _differs("tightened", "", "dtypes", dtype, None)
    for dtype in after.dtypes:
        if dtype not in before.dtypes:
            yield _differs("tightened", "", "dtypes", None, dtype)
    if before.sequences != after.sequences:
        yield _differs("reworded", "", "sequences", before.sequences, after.sequences)


def _entries(before: list[Any], after: list[Any], compare: Any) -> Iterator[Change]:
    old, new = ({x.id: x for x in entries} for entries in (before, after))
    for name, entry in old.items():
        if name not in new:
            yield _differs("loosened", name, name, "there", "gone")
        else:
            yield from compare(entry, new[name])
            yield from _words(entry, new[name])
    for name in (n for n in new if n not in old):
        yield _differs("tightened", name, name, None, "there")


def _limit(a: Limit, b: Limit) -> Iterator[Change]:
    for name in ("fail", "atol", "rtol"):
        yield from _higher_is_looser(a.id, name, getattr(a, name), getattr(b, name))
    yield from _higher_is_looser(a.id, "warn", a.warn, b.warn)
    yield from _higher_is_looser(a.id, "min_tokens", a.min_tokens, b.min_tokens)
    # A tail has two ends: few tokens, and many.
    tails = [[x.fail_at(n) for n in (100, 1_000_000)] for x in (a, b)]
    for tokens, old, new in zip((100, 1_000_000), *tails, strict=True):
        if a.tail != b.tail:
            yield from _higher_is_looser(a.id, f"fail at {tokens:,} tokens", old, new)
    for name in ("edges", "dtypes", "op_classes", "sites"):
        yield from _narrower_is_looser(a.id, name, getattr(a, name), getattr(b, name))
    for name in ("metric", "quantisation"):
        if getattr(a, name) != getattr(b, name):
            yield _differs("loosened", a.id, name, getattr(a, name), getattr(b, name))


def _budget(a: Budget, b: Budget) -> Iterator[Change]:
    for name in STATISTICS:
        yield from _higher_is_looser(a.id, name, getattr(a, name), getattr(b, name))
    yield from _higher_is_looser(a.id, "warn", a.warn, b.warn)
    for name in ("ops", "op_classes"):
        yield from _narrower_is_looser(a.id, name, getattr(a, name), getattr(b, name))


def _regression(a: Regression, b: Regression) -> Iterator[Change]:
    for name in ("factor", "plus"):
        yield from _higher_is_looser(a.id, name, getattr(a, name), getattr(b, name))
    if a.metric != b.metric:
        yield _differs("loosened", a.id, "metric", a.metric, b.metric)


def _waivers(before: Contract, after: Contract) -> Iterator[Change]:
    for waiver in after.waivers:
        if waiver not in before.waivers:
            until = f"until {waiver.expires}, by {waiver.owner}"
            yield _differs("loosened", waiver.limit, "waiver", "none", until)
    for waiver in before.waivers:
        if waiver not in after.waivers:
            yield _differs("tightened", waiver.limit, "waiver", f"until {waiver.expires}", "none")


def _words(a: BaseModel, b: BaseModel) -> Iterator[Change]:
    for name in ("why", "source", "reason", "healthy"):
        old, new = getattr(a, name, None), getattr(b, name, None)
        if old != new:
            yield _differs("reworded", getattr(a, "id", ""), name, old, new)


def _differs(kind: Kind, entry: str, what: str, before: object, after: object) -> Change:
    return Change(kind=kind, entry=entry, what=what, before=_written(before), after=_written(after))


def _written(value: object) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _higher_is_looser(
    entry: str, what: str, before: float | None, after: float | None
) -> Iterator[Change]:
    """Here None means no bound."""
    old, new = (math.inf if x is None else x for x in (before, after))
    if old != new:
        yield _differs("loosened" if new > old else "tightened", entry, what, before, after)


def _lower_is_looser(what: str, before: float, after: float) -> Iterator[Change]:
    if before != after:
        yield _differs("loosened" if after < before else "tightened", "", what, before, after)


def _narrower_is_looser(
    entry: str, what: str, before: list | None, after: list | None
) -> Iterator[Change]:
    """Here None means everything."""
    if before == after:
        return
    wider = after is None or (before is not None and set(before) <= set(after))
    yield _differs("tightened" if wider else "loosened", entry, what, before, after)
