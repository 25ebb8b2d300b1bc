"""`rlk-align compare SIDE SIDE --steps`: compares several steps of a recorded job."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from rlk_align.api.pair import Pair, prepare
from rlk_align.api.steps import RecordedSteps, recorded_steps
from rlk_align.cli import options
from rlk_align.cli.finish import print_report
from rlk_align.cli.outputs import check_outputs, parse_outputs, takes_stdout, write_document
from rlk_align.errors import EXIT_INCONCLUSIVE, RlkError
from rlk_align.progress import Progress, labelled, show_progress
from rlk_align.report.document_terminal import show_document
from rlk_align.report.formats import DOCUMENT_FORMATS
from rlk_align.report.steps import StepResult, StepsReport, steps_document, steps_json


def compare_steps(
    pair: Pair, runs: Sequence[str], steps: str, output: list[str] | None
) -> NoReturn:
    """Compares each step, prints which operator drifted when, and exits as the worst step does."""
    outputs = parse_outputs(output, ("json", *DOCUMENT_FORMATS))
    asked = recorded_steps(pair, runs, steps)
    check_outputs(outputs, asked.run)
    with show_progress("compare") as progress:
        results = [_result(pair, asked, number, progress) for number in asked.numbers]
    incomplete = {str(side): found for side, found in asked.incomplete.items() if found}
    report = StepsReport(results, incomplete, str(asked.run.folder))
    document = steps_document(report)
    print_report(lambda console: show_document(document, console), takes_stdout(outputs))
    write_document(outputs, document, lambda: steps_json(report))
    sys.exit(report.exit_code)


def _result(pair: Pair, asked: RecordedSteps, number: int, progress: Progress) -> StepResult:
    """The verdict of a step, or why it has none: an error in one step leaves the others."""
    if number in asked.missing:
        return StepResult(number, None, asked.missing[number], EXIT_INCONCLUSIVE, "")
    folder = asked.folder(number)
    try:
        prepared = prepare(replace(pair, run_dir=folder), asked.folders[number], options.warn)
        verdict = prepared.start(labelled(progress, f"step {number}"))
    except RlkError as error:
        return StepResult(number, None, error.message, error.exit_code, "")
    return StepResult(number, verdict, "", verdict.exit_code, str(folder))
