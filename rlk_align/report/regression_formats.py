"""What became worse from one run to another, as files: JSON, Markdown, JUnit and GitHub's workflow
commands."""

from rlk_align.judge.regression import RegressionCheck, RegressionVerdict
from rlk_align.report.github import Annotation, commands
from rlk_align.report.junit import JUnitCase, JUnitSuite, junit_text
from rlk_align.report.markup import code, prose, table
from rlk_align.report.verdict_json import contract_json, finite, record_text

_SHOWN = 50
"""Figures of a list that are shown; the rest is counted."""


def regression_json(verdict: RegressionVerdict) -> str:
    """The published record; a NaN is null there."""
    record = {
        "schema": "rlk-align/regression/1",
        "status": verdict.status,
        "exit_code": verdict.exit_code,
        "contract": contract_json(verdict.contract),
        "doubts": verdict.doubts,
        "checks": [c.model_dump() | {"holds": c.holds} for c in verdict.checks],
    }
    return record_text(finite(record))


def regression_markdown(verdict: RegressionVerdict) -> str:
    """A comment for a pull request: figures of whole edges, and operators that are worse."""
    contract = f"contract {code(verdict.contract.id)} {verdict.contract.version}"
    lines = [
        f"## rlk-align: {verdict.status.upper()}",
        "",
        f"**{prose(_finding(verdict))}**, by the regression limits of {contract}.",
        "",
    ]
    lines += [f"- {prose(doubt)}" for doubt in verdict.doubts[:_SHOWN]]
    shown = [c for c in verdict.checks if c.site is None or not c.holds]
    if shown:
        head = ["edge", "where", "metric", "before", "after", "allowed", ""]
        lines.append(table(head, [_row(c) for c in shown[:_SHOWN]], True))
    if len(shown) > _SHOWN:
        lines.append(f"\nand {len(shown) - _SHOWN} more")
    return "\n".join(lines) + "\n"


def _row(check: RegressionCheck) -> list[str]:
    figures = (f"{x:.3g}" for x in (check.before, check.after, check.allowed))
    mark = "" if check.holds else "**worse**"
    where = " ".join(filter(None, [check.side, check.site and code(check.site)]))
    return [code(check.edge), where, code(check.metric), *figures, mark]


def _finding(verdict: RegressionVerdict) -> str:
    if verdict.doubts:
        return f"nothing can be concluded: {verdict.doubts[0]}"
    count = len(verdict.checks)
    if verdict.worse:
        return f"{len(verdict.worse)} of {count} figures are worse than allowed"
    return f"none of {count} figures is worse than allowed"


def regression_junit(verdict: RegressionVerdict) -> str:
    """A test case for each limit, in a suite for each edge."""
    message = _finding(verdict)
    conclusive = JUnitCase(
        name="conclusive",
        outcome="error" if verdict.doubts else None,
        kind="inconclusive",
        message=message,
        lines=[*verdict.doubts[:_SHOWN], message],
    )
    suites = [JUnitSuite(name="evidence", cases=[conclusive])]
    for edge in dict.fromkeys(c.edge for c in verdict.checks):
        checks = [c for c in verdict.checks if c.edge == edge]
        limits = dict.fromkeys(c.limit for c in checks)
        cases = [_case(limit, [c for c in checks if c.limit == limit]) for limit in limits]
        suites.append(JUnitSuite(name=edge, cases=cases))
    return junit_text(suites)


def _case(limit: str, checks: list[RegressionCheck]) -> JUnitCase:
    worse = [c for c in checks if not c.holds]
    if not worse:
        return JUnitCase(name=limit, lines=[f"{len(checks)} checked"])
    return JUnitCase(
        name=limit,
        outcome="failure",
        kind=worse[0].metric,
        message=_words(worse[0]) + (f", and {len(worse) - 1} more" if len(worse) > 1 else ""),
        lines=[*map(_words, worse[:_SHOWN]), f"{len(checks)} checked"],
    )


def _words(check: RegressionCheck) -> str:
    where = " ".join(filter(None, [check.side, check.site])) or check.edge
    return (
        f"{where}: {check.metric} {check.after:.3g}, {check.before:.3g} before, "
        f"{check.allowed:.3g} allowed"
    )


def regression_commands(verdict: RegressionVerdict) -> str:
    """Renders the verdict as annotations, ten at most."""
    title = "nothing can be concluded" if verdict.doubts else "worse than before"
    messages = verdict.doubts or map(_words, verdict.worse)
    return commands([Annotation(level="error", title=title, message=text) for text in messages])
