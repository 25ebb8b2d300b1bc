"""The verdict for GitHub Actions: workflow commands, which it shows as annotations. The summary of
the step is the Markdown report.

GitHub shows ten annotations of a level for a step. The first error is the first operator that is
off, or the first divergence, with its place in the code where that is known.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, get_args

from rlk_align.judge.verdict import Verdict, headline, over_budget
from rlk_align.report.source import ReportSource
from rlk_align.report.words import (
    check_words,
    code_places,
    finding,
    how_words,
    next_step,
    side_off,
    whose_off,
)
from rlk_align.results import CodePlace, EdgeResult
from rlk_align.text import short_printable

SUMMARY = "GITHUB_STEP_SUMMARY"
"""The variable by which GitHub names the file of a step's summary."""
_SHOWN = 10
_SOON = 14
"""Days before a waiver's end from which on it is told of."""
_LONGEST = 1000
Level = Literal["error", "warning", "notice"]


@dataclass(frozen=True, kw_only=True)
class Annotation:
    """One workflow command."""

    level: Level
    title: str
    message: str
    place: CodePlace | None = None

    def __str__(self) -> str:
        given = {"title": f"rlk-align: {self.title}"}
        if self.place is not None and self.place.file:
            given = {"file": self.place.file, "line": str(self.place.line or 1)} | given
        properties = ",".join(f"{name}={_property(value)}" for name, value in given.items())
        return f"::{self.level} {properties}::{_data(self.message)}"


def _data(text: str) -> str:
    """As a workflow command spells a message."""
    said = short_printable(text, _LONGEST, lines=True)
    return said.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """The same for a property's value."""
    return _data(short_printable(text, _LONGEST)).replace(":", "%3A").replace(",", "%2C")


def summary_file() -> str:
    """Where GitHub wants the summary of the step; empty elsewhere."""
    return os.environ.get(SUMMARY, "")


def workflow_commands(source: ReportSource) -> str:
    """What is to be said of a run's verdict."""
    verdict = source.verdict
    return commands([*_errors(source), *_warnings(verdict), *_notices(verdict)])


def commands(annotations: Sequence[Annotation]) -> str:
    """A line for each annotation, the first ten of each level."""
    of_level = ([a for a in annotations if a.level == level][:_SHOWN] for level in get_args(Level))
    return "".join(f"{annotation}\n" for annotation in chain.from_iterable(of_level))


def _errors(source: ReportSource) -> Iterator[Annotation]:
    verdict = source.verdict
    if verdict.status == "pass":
        return
    edge = headline(verdict)
    if verdict.status == "inconclusive" or edge is None:
        step = next_step(verdict, source.place)
        message = f"{finding(verdict)}\nNext: {step}"
        yield Annotation(level="error", title="nothing can be concluded", message=message)
        for doubt in verdict.doubts[1:]:
            yield Annotation(level="error", title="nothing can be concluded", message=doubt)
        return
    # An expired waiver is told before the breaches that would crowd it out.
    first, *rest = _breaches(source, edge) if verdict.breaches else [None]
    expired = (
        Annotation(level="error", title="a waiver has expired", message=str(use))
        for use in verdict.expired
    )
    yield from filter(None, (first, *expired, *rest))


def _breaches(source: ReportSource, edge: EdgeResult) -> Iterator[Annotation]:
    """The first divergence; then every further operator that is off; then limits of tokens."""
    verdict = source.verdict
    over = over_budget(verdict, edge)
    first = over[0].unit if over else edge.first_bitwise
    count = len(verdict.breaches)
    limits = "limit does" if count == 1 else "limits do"
    yield Annotation(
        level="error",
        title=f"first divergence at {first.site}" if first else f"{edge.name} is beyond its limits",
        message=f"{finding(verdict)}\nSide: {side_off(verdict)}.\n"
        f"Next: {next_step(verdict, source.place)}.\n{count} {limits} not hold.",
        place=_place(verdict, edge, first.site, over[0].side if over else None) if first else None,
    )
    for found in over[1:]:
        how = "; ".join(f"{where}: {how}" for where, how in how_words(verdict, found))
        yield Annotation(
            level="error",
            title=f"{found.unit.site} is beyond its budget",
            message=": ".join(filter(None, [whose_off(found), how])),
            place=_place(verdict, edge, found.unit.site, found.side),
        )
    told = {found.unit.site for found in over}
    for check in verdict.breaches:
        if check.edge != edge.name or check.site not in told:
            yield Annotation(
                level="error", title=f"{check.limit} does not hold", message=check_words(check)
            )


def _place(verdict: Verdict, edge: EdgeResult, site: str, side: str | None) -> CodePlace | None:
    """In the code of the side that is off, or else of the training engine, or else of any."""
    places = {s: place for s, place, _ in code_places(verdict, edge, site) if place.file}
    return places.get(side or "", places.get("train", next(iter(places.values()), None)))


def _warnings(verdict: Verdict) -> Iterator[Annotation]:
    for check in verdict.warnings:
        yield Annotation(
            level="warning", title=f"{check.limit} is nearly used up", message=check_words(check)
        )
    for use in verdict.waivers:
        if use.state == "unused":
            yield Annotation(level="warning", title="a waiver is not used", message=str(use))


def _notices(verdict: Verdict) -> Iterator[Annotation]:
    for use in verdict.waivers:
        if 0 <= use.days_left <= _SOON:
            yield Annotation(level="notice", title="a waiver ends soon", message=str(use))
