"""The verdict as JUnit XML, which every CI reads: a test case for each limit and op class.

There is a suite for each judged edge, one for the evidence behind the verdict, and one for waivers.
A breach is a failure, a doubt an error, and a waived breach a skipped test with its reason. Figures
are properties of suites, because the schema of Jenkins has no properties of test cases.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal
from xml.etree import ElementTree

from rlk_align.judge.checks import LimitCheck
from rlk_align.judge.verdict import PARITY_KINDS, Verdict, cause_of, parity
from rlk_align.judge.waivers import WaiverUse
from rlk_align.judge.wording import how_off
from rlk_align.report.source import ReportSource
from rlk_align.report.words import (
    LONGER_PROMPTS,
    bounded,
    check_words,
    engine_spec,
    finding,
    mismatch_words,
    next_step,
    positions_words,
    side_off,
)
from rlk_align.results import EdgeResult
from rlk_align.text import short_printable

_SHOWN = 20
"""The most checks that a test case shows; the rest is counted."""
_LONGEST = 1000
Properties = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class JUnitCase:
    """One test case."""

    name: str
    outcome: Literal["failure", "error", "skipped"] | None = None
    kind: str = ""
    message: str = ""
    lines: Sequence[str] = ()
    """The case's text below the message."""


@dataclass(frozen=True, kw_only=True)
class JUnitSuite:
    """Test cases that belong together."""

    name: str
    cases: list[JUnitCase]
    properties: Properties = field(default_factory=dict)

    def count(self, outcome: str) -> int:
        return sum(case.outcome == outcome for case in self.cases)


def junit(source: ReportSource) -> str:
    """Renders a run's verdict as XML."""
    verdict = source.verdict
    suites = [_evidence(source)]
    if not verdict.comparison.stopped:
        judged = verdict.comparison.judged
        suites += [_of_edge(verdict, e) for e in verdict.comparison.edges if e.name in judged]
    if verdict.waivers:
        suites.append(
            JUnitSuite(name="waivers", cases=[_of_waiver(use) for use in verdict.waivers])
        )
    return junit_text(suites)


def junit_text(suites: Sequence[JUnitSuite]) -> str:
    """Renders suites as XML."""
    root = ElementTree.Element("testsuites", {"name": "rlk-align"} | _counts(suites))
    for suite in suites:
        root.append(_suite_element(suite))
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, "unicode")}\n'


def _counts(suites: Sequence[JUnitSuite]) -> dict[str, str]:
    counts = {
        "tests": sum(len(s.cases) for s in suites),
        "failures": sum(s.count("failure") for s in suites),
        "errors": sum(s.count("error") for s in suites),
    }
    return {name: str(count) for name, count in counts.items()}


def _suite_element(suite: JUnitSuite) -> ElementTree.Element:
    counts = _counts([suite]) | {"skipped": str(suite.count("skipped"))}
    element = ElementTree.Element("testsuite", {"name": suite.name} | counts)
    if suite.properties:
        properties = ElementTree.SubElement(element, "properties")
        for name, value in suite.properties.items():
            pair = {"name": _text(name), "value": _text(value)}
            ElementTree.SubElement(properties, "property", pair)
    for case in suite.cases:
        element.append(_case_element(suite, case))
    return element


def _case_element(suite: JUnitSuite, case: JUnitCase) -> ElementTree.Element:
    named = {"name": _text(case.name), "classname": f"rlk-align.{suite.name}"}
    element = ElementTree.Element("testcase", named)
    text = "\n".join(map(_text, case.lines))
    if case.outcome:
        result = {"type": _text(case.kind), "message": _text(case.message)}
        ElementTree.SubElement(element, case.outcome, result).text = text or None
    elif text:
        ElementTree.SubElement(element, "system-out").text = text
    return element


def _text(text: object) -> str:
    """Returns short text without characters that XML forbids."""
    return short_printable(text, _LONGEST)


def _evidence(source: ReportSource) -> JUnitSuite:
    """Returns the suite of the conditions of a verdict."""
    verdict, c = source.verdict, source.verdict.comparison
    contract = verdict.contract
    properties: Properties = {
        "status": verdict.status,
        "exit_code": verdict.exit_code,
        "cause": cause_of(verdict) or "unknown",
        "contract": f"{contract.id} {contract.version}",
        "contract.sha256": contract.sha256,
        "model": c.model,
        "dtype": c.dtype,
        "tokens": c.tokens,
        "positions.tested": c.longest_sequence,
        "positions.context": c.context,
    }
    for side, engine in c.engines.items():
        properties[side] = f"{engine_spec(engine)} {engine.version}"
    step = next_step(verdict, source.bare_path)
    lines = [finding(verdict), f"side: {side_off(verdict)}", f"next: {step}"]
    if tested := positions_words(c):
        lines.append(f"{tested}: {LONGER_PROMPTS}")
    doubts = verdict.doubts
    conclusive = JUnitCase(
        name="conclusive",
        outcome="error" if doubts else None,
        kind="inconclusive",
        message=f"nothing can be concluded: {doubts[0]}" if doubts else "",
        lines=bounded([*doubts, *lines], _SHOWN),
    )
    cases = [*(_of_parity(verdict, kind) for kind in PARITY_KINDS), conclusive]
    return JUnitSuite(name="evidence", cases=cases, properties=properties)


def _of_parity(verdict: Verdict, kind: str) -> JUnitCase:
    c, state = verdict.comparison, parity(verdict.comparison, kind)
    mismatches = [mismatch_words(m) for m in c.mismatches if m.kind == kind and m.stops]
    if not mismatches:
        return JUnitCase(name=kind, lines=[] if state == "equal" else [f"{kind}: {state}"])
    return JUnitCase(
        name=kind,
        outcome="error" if state == "mismatch" else "skipped",
        kind=state,
        message=f"{state}: {mismatches[0]}",
        lines=bounded(mismatches, _SHOWN),
    )


def _of_edge(verdict: Verdict, edge: EdgeResult) -> JUnitSuite:
    """Returns the suite of an edge: its limits by op class, in the contract's order."""
    groups: dict[str, list[LimitCheck]] = {}
    for check in verdict.checks:
        if check.edge == edge.name:
            name = f"{check.limit} [{check.op_class}]" if check.op_class else check.limit
            groups.setdefault(name, []).append(check)
    properties: Properties = {n: repr(v) for n, v in edge.metrics.model_dump().items()}
    for name, checks in groups.items():
        worst = max(checks, key=_badness)
        properties |= {f"{name} value": repr(worst.value), f"{name} limit": repr(worst.fail)}
    cases = [_of_limit(verdict, name, checks) for name, checks in groups.items()]
    return JUnitSuite(name=edge.name, cases=cases, properties=properties)


def _of_limit(verdict: Verdict, name: str, checks: list[LimitCheck]) -> JUnitCase:
    """Returns the case of one limit on the operators of one class, or on the tokens of an edge."""
    failed, waived, near = (
        sorted((c for c in checks if c.outcome == outcome), key=_badness, reverse=True)
        for outcome in ("fail", "waived", "warn")
    )
    notable = [*failed, *waived, *near]
    lines = bounded([_check_line(c, verdict) for c in notable], _SHOWN)
    lines += [f"{len(checks)} checked"] if notable else []
    if failed:
        more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
        message = f"{check_words(failed[0])}{more}"
        kind = failed[0].metric
        return JUnitCase(name=name, outcome="failure", kind=kind, message=message, lines=lines)
    if waived:
        w = waived[0].waiver
        message = f"waived by {w.owner} until {w.expires}: {w.reason}" if w else ""
        return JUnitCase(name=name, outcome="skipped", kind="waived", message=message, lines=lines)
    return JUnitCase(name=name, lines=lines)


def _check_line(check: LimitCheck, verdict: Verdict) -> str:
    """Returns the figure of a check; for an operator also its error and its location in the
    code."""
    state = {"waived": "waived: ", "warn": "near its limit: "}.get(check.outcome, "")
    parts = [f"{state}{check_words(check)}"]
    for u in verdict.comparison.referee:
        if (u.side, u.passname, u.site) == (check.side, check.passname, check.site):
            code = f"in {u.code}" if u.code else ""
            parts += [how_off(u, verdict.contract), code]
    return "; ".join(filter(None, parts))


def _badness(check: LimitCheck) -> tuple[bool, float]:
    return not check.holds, check.excess


def _of_waiver(use: WaiverUse) -> JUnitCase:
    w = use.waiver
    where = ", ".join([*(w.edges or ()), *(w.sites or ())])
    name = f"{w.limit} until {w.expires}, {w.owner}" + (f": {where}" if where else "")
    if use.state == "expired":
        return JUnitCase(name=name, outcome="failure", kind="expired", message=str(use))
    return JUnitCase(name=name, lines=[str(use)])
