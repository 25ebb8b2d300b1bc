"""The comparison of a run with an earlier one, as JSON, Markdown, JUnit and workflow commands of
GitHub."""

from rlk_align.judge.regression import RegressionCheck, RegressionVerdict
from rlk_align.report.document_markdown import document_markdown
from rlk_align.report.github import Annotation, commands
from rlk_align.report.junit import JUnitCase, JUnitSuite, junit_text
from rlk_align.report.regression import finding, regression_document
from rlk_align.report.verdict_json import contract_json, finite, record_text

_SHOWN = 50
"""The most figures that a list shows; the rest is counted."""


def regression_json(verdict: RegressionVerdict) -> str:
    """Returns the published record, in which a NaN is null."""
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
    """Returns a comment for a pull request: figures of whole edges, and operators that are
    worse."""
    return document_markdown(regression_document(verdict))


def regression_junit(verdict: RegressionVerdict) -> str:
    """Returns a suite for each edge with a test case for each limit."""
    message = finding(verdict)
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
