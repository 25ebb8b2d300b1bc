"""Several steps of a recorded job: which operator drifted when."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlk_align.errors import EXIT_FAIL, EXIT_INCONCLUSIVE, EXIT_PASS, EXIT_TOOL, EXIT_USAGE
from rlk_align.judge.verdict import Status, Verdict, headline, over_budget
from rlk_align.report.document import DataTable, Document, Fact, Section
from rlk_align.report.verdict_json import finite, record_text, verdict_json
from rlk_align.report.words import mismatch_words

_WORST_FIRST = (EXIT_TOOL, EXIT_USAGE, EXIT_INCONCLUSIVE, EXIT_FAIL, EXIT_PASS)


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step: its verdict, or why it has none."""

    number: int
    verdict: Verdict | None
    reason: str
    exit_code: int
    folder: str
    """The run of the step; empty without a verdict."""

    @property
    def status(self) -> str:
        if self.verdict is not None:
            return self.verdict.status
        return "inconclusive" if self.exit_code == EXIT_INCONCLUSIVE else "error"

    @property
    def off(self) -> dict[str, str]:
        """Operator -> the side that is off in it, in the order of execution."""
        if self.verdict is None:
            return {}
        judged = self.verdict.comparison.judged
        return {
            over.unit.site: over.side or "unknown"
            for edge in self.verdict.comparison.edges
            if edge.name in judged
            for over in over_budget(self.verdict, edge)
        }


@dataclass(frozen=True, slots=True)
class StepsReport:
    """All steps that were asked for."""

    steps: Sequence[StepResult]
    incomplete: Mapping[str, Mapping[int, str]]
    """Side -> the steps that it did not complete -> why."""
    folder: str

    @property
    def exit_code(self) -> int:
        """That of the worst step."""
        codes = {step.exit_code for step in self.steps}
        return next(code for code in _WORST_FIRST if code in codes)

    @property
    def status(self) -> Status:
        statuses: dict[int, Status] = {EXIT_PASS: "pass", EXIT_FAIL: "fail"}
        return statuses.get(self.exit_code, "inconclusive")

    @property
    def operators(self) -> dict[str, dict[int, str]]:
        """Operator -> step -> the side that is off; operators in the order in which they were found
        to be."""
        found: dict[str, dict[int, str]] = {}
        for step in self.steps:
            for site, side in step.off.items():
                found.setdefault(site, {})[step.number] = side
        return found


def steps_document(report: StepsReport) -> Document:
    """The report for people."""
    worst = next(step for step in report.steps if step.exit_code == report.exit_code)
    others = [step.number for step in report.steps if step.status != "pass"]
    what = _what(worst)
    return Document(
        status=report.status,
        headline=f"{len(report.steps) - len(others)} of {len(report.steps)} steps pass."
        + (f" Step {worst.number}: {what}." if others and what else ""),
        folder=report.folder,
        facts=[
            Fact("incomplete", f"{side} step {step}: {reason}", "doubt")
            for side, steps in report.incomplete.items()
            for step, reason in steps.items()
        ],
        sections=[_steps_section(report), *_operators_section(report)],
        next_steps=[f"the whole verdict of step {worst.number}: rlk-align gate {worst.folder}"]
        if worst.folder
        else [],
    )


def _steps_section(report: StepsReport) -> Section:
    return Section(
        heading="steps",
        table=DataTable(
            name="steps",
            caption="The edge is the one that the step's own verdict names first.",
            columns=("step", "verdict", "what", "edge", "max |Δ|", "mean |Δ|", "≠ bits", "tokens"),
            rows=[
                [str(step.number), step.status, _what(step), *_figures(step)]
                for step in report.steps
            ],
            names=4,
        ),
    )


def _figures(step: StepResult) -> list[str]:
    edge = headline(step.verdict) if step.verdict is not None else None
    if edge is None:
        return [""] * 5
    m = edge.metrics
    return [
        edge.name,
        f"{m.max_abs_dlogp:.2g}",
        f"{m.mean_abs_dlogp:.2g}",
        f"{m.bit_mismatches}",
        f"{m.tokens}",
    ]


def _what(step: StepResult) -> str:
    """The first thing that is wrong with a step; empty if nothing is."""
    if step.verdict is None:
        return step.reason
    stops = [m for m in step.verdict.comparison.mismatches if m.stops]
    if stops:
        return mismatch_words(stops[0])
    if step.off:
        site, side = next(iter(step.off.items()))
        return f"{site} ({side})"
    return next(iter(step.verdict.doubts), "")


def _operators_section(report: StepsReport) -> Sequence[Section]:
    operators = report.operators
    if not operators:
        return []
    numbers = [step.number for step in report.steps]
    rows = [
        [site, *(sides.get(number, "") for number in numbers)] for site, sides in operators.items()
    ]
    table = DataTable(
        name="operators",
        caption="The side whose operator is beyond its budget, by step.",
        columns=("operator", *map(str, numbers)),
        rows=rows,
    )
    return [Section(heading="which operator drifted when", table=table)]


def steps_json(report: StepsReport) -> str:
    """The report for programs."""
    record = {
        "schema": "rlk-align/steps/1",
        "status": report.status,
        "exit_code": report.exit_code,
        "steps": [_step_json(step) for step in report.steps],
        "operators": {
            site: {str(step): side for step, side in sides.items()}
            for site, sides in report.operators.items()
        },
        "incomplete": {
            side: {str(step): reason for step, reason in steps.items()}
            for side, steps in report.incomplete.items()
        },
    }
    return record_text(finite(record))


def _step_json(step: StepResult) -> dict[str, Any]:
    verdict = None if step.verdict is None else verdict_json(step.verdict)
    return {
        "step": step.number,
        "status": step.status,
        "exit_code": step.exit_code,
        "reason": step.reason,
        "run": step.folder,
        "over_budget": step.off,
        "verdict": verdict,
    }
