"""The verdict for GitHub Actions: workflow commands, which GitHub shows as annotations. The summary
of the step is the Markdown report.

GitHub shows at most ten annotations of each level for a step. The first error is the first operator
that is off, or the first divergence, with its location in the code if known.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, get_args

from rlk_align.judge.verdict import Verdict, headline, over_budget
from rlk_align.report.source import ReportSource
from rlk_align.report.words import (
    LONGER_PROMPTS,
    check_words,
    code_places,
    finding,
    how_words,
    next_step,
    positions_words,
    side_off,
    whose_off,
)
from rlk_align.results import CodePlace, EdgeResult
from rlk_align.text import short_printable

SUMMARY = "GITHUB_STEP_SUMMARY"
"""The environment variable with the path of a step's summary."""
_SHOWN = 10
_NOTICE_DAYS = 14
"""A notice announces a waiver that ends within this many days."""
_LONGEST = 1000
Level = Literal["error", "warning", "notice"]


@dataclass(frozen=True, kw_only=True)
class Annotation:
    """One workflow command."""

    level: Level
    title: str
    message: str
    location: CodePlace | None = None

    def __str__(self) -> str:
        properties = {"title": f"rlk-align: {self.title}"}
        if self.location is not None and self.location.file:
            properties = {
                "file": self.location.file,
                "line": str(self.location.line or 1),
            } | properties
        written = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
        return f"::{self.level} {written}::{_data(self.message)}"


def _data(text: str) -> str:
    """Escapes a message for workflow commands."""
    message = short_printable(text, _LONGEST, lines=True)
    return message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """Escapes the value of a property."""
    return _data(short_printable(text, _LONGEST)).replace(":", "%3A").replace(",", "%2C")


def summary_file() -> str:
    """Returns the path of the step's summary on GitHub; empty elsewhere."""
    return os.environ.get(SUMMARY, "")


def workflow_commands(source: ReportSource) -> str:
    """Returns the annotations of a run's verdict."""
    verdict = source.verdict
    return commands([*_errors(source), *_warnings(verdict), *_notices(verdict)])


def commands(annotations: Sequence[Annotation]) -> str:
    """Returns a line for each annotation: the first ten of each level."""
    of_level = ([a for a in annotations if a.level == level][:_SHOWN] for level in get_args(Level))
    return "".join(f"{annotation}\n" for annotation in chain.from_iterable(of_level))


def _errors(source: ReportSource) -> Iterator[Annotation]:
    verdict = source.verdict
    if verdict.status == "pass":
        return
    edge = headline(verdict)
    if verdict.status == "inconclusive" or edge is None:
        first = f"{finding(verdict)}\nNext: {next_step(verdict, source.bare_path)}"
        for message in (first, *verdict.doubts[1:]):
            yield Annotation(level="error", title="nothing can be concluded", message=message)
        return
    # An expired waiver comes second, because the breaches may use up the annotations.
    breaches = list(_breaches(source, edge)) if verdict.breaches else []
    yield from breaches[:1]
    for use in verdict.expired:
        yield Annotation(level="error", title="a waiver has expired", message=str(use))
    yield from breaches[1:]


def _breaches(source: ReportSource, edge: EdgeResult) -> Iterator[Annotation]:
    """Yields the first divergence, then every further operator that is off, then limits on
    tokens."""
    verdict = source.verdict
    over = over_budget(verdict, edge)
    first = over[0].unit if over else edge.first_bitwise
    count = len(verdict.breaches)
    limits = "limit does" if count == 1 else "limits do"
    yield Annotation(
        level="error",
        title=f"first divergence at {first.site}" if first else f"{edge.name} is beyond its limits",
        message=f"{finding(verdict)}\nSide: {side_off(verdict)}.\n"
        f"Next: {next_step(verdict, source.bare_path)}.\n{count} {limits} not hold.",
        location=_code_location(verdict, edge, first.site, over[0].side if over else None)
        if first
        else None,
    )
    for operator in over[1:]:
        how = "; ".join(f"{where}: {how}" for where, how in how_words(verdict, operator))
        yield Annotation(
            level="error",
            title=f"{operator.unit.site} is beyond its budget",
            message=": ".join(filter(None, [whose_off(operator), how])),
            location=_code_location(verdict, edge, operator.unit.site, operator.side),
        )
    annotated = {operator.unit.site for operator in over}
    for check in verdict.breaches:
        if check.edge != edge.name or check.site not in annotated:
            yield Annotation(
                level="error", title=f"{check.limit} is breached", message=check_words(check)
            )


def _code_location(
    verdict: Verdict, edge: EdgeResult, site: str, side: str | None
) -> CodePlace | None:
    """Returns the code of the side that is off, else of the training engine, else of the other."""
    places = {s: place for s, place, _ in code_places(verdict, edge, site) if place.file}
    return places.get(side or "", places.get("train", next(iter(places.values()), None)))


def _warnings(verdict: Verdict) -> Iterator[Annotation]:
    for check in verdict.warnings:
        yield Annotation(
            level="warning", title=f"{check.limit} is nearly reached", message=check_words(check)
        )
    for use in verdict.waivers:
        if use.state == "unused":
            yield Annotation(level="warning", title="a waiver is not used", message=str(use))


def _notices(verdict: Verdict) -> Iterator[Annotation]:
    tested = positions_words(verdict.comparison)
    if verdict.status == "pass" and tested:
        message = f"{tested}: {LONGER_PROMPTS}."
        yield Annotation(level="notice", title="tested positions", message=message)
    for use in verdict.waivers:
        if 0 <= use.days_left <= _NOTICE_DAYS:
            yield Annotation(level="notice", title="a waiver ends soon", message=str(use))
