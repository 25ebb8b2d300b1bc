"""Delivers a verdict: on the terminal, in files, and as an exit code."""

import sys
from collections.abc import Callable
from typing import NoReturn

from rich.console import Console

from rlk_align.api.pair import PreparedPair
from rlk_align.cli.cost import cost_lines
from rlk_align.cli.options import warn
from rlk_align.cli.outputs import (
    OutputTarget,
    silence_stdout,
    takes_stdout,
    write_regression,
    write_run,
    write_text,
)
from rlk_align.errors import EXIT_INCONCLUSIVE
from rlk_align.judge.regression import RegressionVerdict
from rlk_align.judge.verdict import Verdict
from rlk_align.probe.record import Probe
from rlk_align.report.document import Document, Fact
from rlk_align.report.document_terminal import show_document
from rlk_align.report.kernels_change import show_change
from rlk_align.report.regression import regression_document
from rlk_align.report.source import ReportSource
from rlk_align.report.verdict import verdict_document
from rlk_align.report.verdict_json import record_text, too_few_json
from rlk_align.report.words import MORE_TOKENS
from rlk_align.text import line
from rlk_align.trace.run import Run


class _Stdout(Console):
    def on_broken_pipe(self) -> None:
        silence_stdout()


def finish(
    verdict: Verdict,
    run: Run,
    outputs: list[OutputTarget],
    probe: Probe | None = None,
    beside: tuple[Verdict, Run] | None = None,
) -> NoReturn:
    """Prints the verdict (on stderr where an output takes stdout), writes each output, and exits
    with the verdict's code even if the verdict could not be printed.

    `beside`: the verdict and the run of the same engines without the kernels, for a comparison
    below the verdict.
    """

    def everything(console: Console) -> None:
        show_document(verdict_document(verdict, run.folder, probe), console)
        if beside is not None:
            show_change(beside[0], verdict, beside[1].folder, console)
            for text in cost_lines(beside[1].reopened(), run.reopened()):
                console.print(line(text, style="dim"))

    print_report(everything, takes_stdout(outputs))
    if outputs:
        other = _source(*beside, None) if beside is not None else None
        write_run(outputs, _source(verdict, run, probe), other)
    sys.exit(verdict.exit_code)


def _source(verdict: Verdict, run: Run, probe: Probe | None) -> ReportSource:
    finished = run.reopened()
    return ReportSource(run=finished, record=finished.record, verdict=verdict, probe=probe)


def finish_too_few(pair: PreparedPair, outputs: list[OutputTarget]) -> NoReturn:
    """Reports before any capture that a run samples too few tokens to be conclusive. Only JSON
    outputs are written: the other formats show a run, and there is none."""
    contract = pair.contract
    needed = f"{contract.min_tokens:,} are needed"
    doubt = f"at most {pair.most_tokens:,} sampled tokens, {needed}: nothing was captured"

    document = Document(
        status="inconclusive",
        headline=f"Nothing can be concluded: {doubt}.",
        folder="",
        facts=[Fact("contract", f"{contract.id} {contract.version}")],
        sections=[],
        next_steps=[MORE_TOKENS],
    )
    print_report(lambda console: show_document(document, console), takes_stdout(outputs))
    record = record_text(too_few_json(contract, pair.model, pair.dtype, doubt))
    for output in outputs:
        if output.format == "json":
            write_text(output.path, record)
    sys.exit(EXIT_INCONCLUSIVE)


def finish_regression(
    verdict: RegressionVerdict, runs: tuple[Run, Run], outputs: list[OutputTarget]
) -> NoReturn:
    """Prints what became worse from one run to another, writes each output, and exits."""
    folders = (runs[0].folder, runs[1].folder)
    document = regression_document(verdict, folders)
    print_report(lambda console: show_document(document, console), takes_stdout(outputs))
    write_regression(outputs, verdict)
    sys.exit(verdict.exit_code)


def print_report(show_on: Callable[[Console], None], to_stderr: bool) -> None:
    """Prints a report for people. A closed pipe or a full disk does not change the exit code."""
    console = _Stdout(stderr=to_stderr, highlight=False, soft_wrap=True)
    try:
        show_on(console)
        sys.stdout.flush()
    except BrokenPipeError:
        silence_stdout()
    except OSError as error:
        warn(f"the verdict could not be printed: {error.strerror}")
        silence_stdout()
