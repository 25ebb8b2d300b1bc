"""How a verdict leaves the process: on the terminal, in files, as an exit code."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from rlk_align.cli.options import warn
from rlk_align.errors import EXIT_FAIL, EXIT_PASS, TraceNotWritten
from rlk_align.judge.contract import Contract
from rlk_align.judge.regression import RegressionCheck
from rlk_align.judge.verdict import Verdict
from rlk_align.probe.record import Probe
from rlk_align.report.regression import regression_json, show_regression
from rlk_align.report.terminal import show
from rlk_align.report.verdict_json import verdict_json
from rlk_align.trace.run import Run


def silence_stdout() -> None:
    """Nothing more is said there: nobody reads on (`| head`), or the disk behind it is full."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - Python flushes it at its end


class _Stdout(Console):
    def on_broken_pipe(self) -> None:
        silence_stdout()


def finish(verdict: Verdict, run: Run, outputs: list[Path], probe: Probe | None = None) -> NoReturn:
    """Prints the verdict on stdout, writes each output, and exits with its code, whether anybody
    could read it or not."""
    _print(lambda console: show(verdict, run.folder, console, probe))
    _write(verdict_json(verdict, probe), outputs)
    sys.exit(verdict.exit_code)


def finish_regression(
    checks: list[RegressionCheck], contract: Contract, runs: tuple[Run, Run], outputs: list[Path]
) -> NoReturn:
    """The same for what became worse from one run to another."""
    code = EXIT_PASS if all(check.holds for check in checks) else EXIT_FAIL
    folders = (runs[0].folder, runs[1].folder)
    _print(lambda console: show_regression(checks, contract, folders, console))
    _write(regression_json(checks, contract, code), outputs)
    sys.exit(code)


def _print(show_on: Callable[[Console], None]) -> None:
    console = _Stdout(highlight=False, soft_wrap=True)
    try:
        show_on(console)
        sys.stdout.flush()
    except BrokenPipeError:
        silence_stdout()
    except OSError as error:
        warn([f"the verdict could not be printed: {error.strerror}"])
        silence_stdout()


def _write(record: dict[str, Any], outputs: list[Path]) -> None:
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    for path in outputs:
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise TraceNotWritten(f"{path} could not be written: {error}") from error
