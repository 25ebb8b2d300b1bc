"""The table of operators, in execution order."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from rlk_align.report.html.svg import figure
from rlk_align.report.operator_facts import STATES, OperatorFacts
from rlk_align.results import CodePlace, SideName


@dataclass(frozen=True, kw_only=True)
class TableCell:
    """One cell; `value` is its key for sorting, where that is not its text."""

    text: str = ""
    lines: list[str] = field(default_factory=list)
    classes: str = ""
    value: str | None = None
    folded: bool = False
    """Whether its lines are folded."""


_COLUMNS = [
    ("#", "num"),
    ("operator", ""),
    ("state", ""),
    ("rows that differ", "num"),
    ("mean", "num"),
    ("largest", "num"),
    ("introduced", "num"),
    ("inherited", "num"),
    ("gain", "num"),
    ("|Δlogp|", "num"),
    ("used", "num"),
    ("rollout off", "num"),
    ("train off", "num"),
    ("code", ""),
]


def operator_table(
    operators: list[OperatorFacts],
) -> tuple[list[tuple[str, str]], list[tuple[OperatorFacts, list[TableCell]]]]:
    """Returns the columns, each with its class, and the cells of each operator. Columns that are
    empty for every operator are omitted."""
    rows = [(o, list(_cells(o))) for o in operators]
    used = [n for n in range(len(_COLUMNS)) if any(_says_something(cells[n]) for _, cells in rows)]
    return [_COLUMNS[n] for n in used], [(o, [cells[n] for n in used]) for o, cells in rows]


def _says_something(cell: TableCell) -> bool:
    return bool(cell.lines) or cell.text not in ("", "–")


def _cells(o: OperatorFacts) -> Iterator[TableCell]:
    sign, words = STATES[o.state]
    yield TableCell(text=str(o.order), classes="num", value=str(o.order))
    yield TableCell(text=o.site.site, classes="site mono")
    off = [o.side, *o.how] if o.side else []
    yield TableCell(text=f"{sign} {words}", lines=off, classes="state")
    yield _number(float(o.site.differ), f"{o.site.differ:,} of {o.site.rows:,}")
    for size in (o.mean, o.largest, o.introduced, o.inherited):
        yield _number(size)
    yield _number(o.unit.gain if o.unit else None)
    yield _number(o.contribution.mean_abs if o.contribution else None)
    used = o.worst.excess if o.worst and o.worst.value else None
    yield _number(used, f"{used:.0%}" if used is not None and math.isfinite(used) else None)
    yield _number(_roundings(o, "rollout"))
    yield _number(_roundings(o, "train"))
    lines = list(_code(o))
    yield TableCell(text="code" if lines else "", lines=lines, folded=bool(lines))


def _number(value: float | None, text: str | None = None) -> TableCell:
    """Returns a numeric cell; a NaN and an infinity sort above all numbers."""
    if value is None:
        return TableCell(text="–", classes="num")
    size = repr(value) if math.isfinite(value) else "1e999"
    return TableCell(text=text or figure(value), classes="num", value=size)


def _roundings(o: OperatorFacts, side: SideName) -> float | None:
    """Returns a side's error against float64 in roundings: the largest of its passes."""
    sizes = [u.errors.rms for u in o.refereed if u.side == side and u.errors is not None]
    return max(sizes, key=lambda rms: math.inf if math.isnan(rms) else rms, default=None)


def _code(o: OperatorFacts) -> Iterator[str]:
    """Yields where each side computes the operator, the settings that one side alone has, and the
    passes that were not recomputed."""
    places: dict[str, CodePlace] = {u.side: u.code for u in o.refereed if u.code is not None}
    for side, place in places.items():
        yield f"{side}: {place}"
        others = [p for s, p in places.items() if s != side]
        unlike = [f"{n}={v}" for other in others for n, v in place.settings_unlike(other).items()]
        if unlike and o.state in ("over", "introducer"):
            yield f"only there: {', '.join(unlike)}"
    for unit in o.refereed if o.state == "over" else ():
        if unit.settings:
            yield f"{unit.side} {unit.passname}: {', '.join(map(str, unit.settings))}"
    for unit in o.refereed:
        if unit.errors is None:
            yield f"{unit.side} {unit.passname} not recomputed: {unit.reason}"
