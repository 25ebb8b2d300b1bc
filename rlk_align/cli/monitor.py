"""`rlk-align monitor`: follows training runs step by step; needs neither an engine nor torch."""

import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from rlk_align.cli import options
from rlk_align.cli.monitor_outputs import FORMATS, StepOutputs
from rlk_align.cli.outputs import parse_outputs, takes_stdout
from rlk_align.errors import BadOption
from rlk_align.logs.diagnose.contract import RUN_CONTRACT, load_run_contract
from rlk_align.logs.monitor.record import StepRecord
from rlk_align.report.steps_terminal import finding_lines, steps_table
from rlk_align.text import line

if TYPE_CHECKING:
    from rlk_align.logs.monitor.run_monitor import RunMonitor

SHOWN = 20
"""The most steps in the live table."""
WIDTH = 180
"""Columns of the table in a file or a pipe."""
POLL = 2.0
"""Seconds between two reads of the sources."""


def monitor(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...",
            help="Runs: a folder of dumps, an imported run, a neutral file, or a log of metrics.",
        ),
    ],
    once: Annotated[
        bool,
        typer.Option("--once", help="Read the steps written so far, judge them and exit, for CI."),
    ] = False,
    contract: options.RunContractName = RUN_CONTRACT,
    output: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FMT=PATH",
            help="Also write the steps: jsonl (one line per step), prometheus, html, tensorboard "
            "(a folder) or wandb (a folder, offline).",
        ),
    ] = None,
) -> None:
    """Follow training runs: E[ρ] − 1, the noise, KL, outliers, version lag, and trends.

    Steps are read while the run writes them. With --once the exit code is 0 where every step keeps
    the limits, 1 where one does not, and 4 where nothing was compared.
    """
    from rlk_align.logs.monitor.run_monitor import RunMonitor
    from rlk_align.logs.monitor.step_sources import open_source

    outputs = parse_outputs(output, FORMATS)
    if len({path.absolute() for path in paths}) < len(paths):
        raise BadOption("a run is named twice", "name each run once")
    limits = load_run_contract(contract)
    sources = [(open_source(path), RunMonitor(limits)) for path in paths]
    console = _console(takes_stdout(outputs))
    several = len(sources) > 1
    with StepOutputs(outputs) as written, _shown(console, several) as shown:

        def read_steps() -> None:
            for source, watched in sources:
                for record in source.poll(watched, ended=once):
                    written.add(source.name, record)
                    shown.add(source.name, record)

        read_steps()
        while not once:
            shown.refresh()
            written.flush()
            time.sleep(POLL)
            read_steps()
        shown.refresh()
    console.print()
    for source, watched in sources:
        console.print(_summary(source.name, watched))
    codes = {watched.exit_code for _, watched in sources}
    sys.exit(next(code for code in (4, 1, 0) if code in codes))


class _Rows:
    """Prints each new step as a row: for a file or a pipe."""

    def __init__(self, console: Console, several: bool) -> None:
        self._console, self._several = console, several
        self._reported: dict[str, set[tuple[str, str]]] = {}
        self._header = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def add(self, run: str, record: StepRecord) -> None:
        """Shows the next step of a run."""
        self._console.print(steps_table([(run, record)], self._several, self._header))
        self._header = False
        self._report(run, record)

    def _report(self, run: str, record: StepRecord) -> None:
        """Prints the findings of a step, without those that continue from the step before."""
        for text in finding_lines(run if self._several else "", record, self._reported.get(run)):
            self._console.print(text)
        self._reported[run] = {(f.level, f.name) for f in record.findings}

    def refresh(self) -> None:
        """Does nothing: every row has been printed."""


class _LiveTable(_Rows):
    """Shows the last steps as a table that is redrawn: for a terminal."""

    def __init__(self, console: Console, several: bool) -> None:
        super().__init__(console, several)
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._last: deque[tuple[str, StepRecord]] = deque(maxlen=SHOWN)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._live.stop()

    def add(self, run: str, record: StepRecord) -> None:
        """Shows the next step of a run."""
        self._last.append((run, record))
        self._report(run, record)
        self._live.update(steps_table([*self._last], self._several))

    def refresh(self) -> None:
        """Redraws the table."""
        self._live.refresh()


def _shown(console: Console, several: bool) -> _Rows:
    return (_LiveTable if console.is_terminal else _Rows)(console, several)


def _console(to_stderr: bool) -> Console:
    """Returns a console. In a file or a pipe the table has its full width."""
    console = Console(stderr=to_stderr, highlight=False)
    return (
        console
        if console.is_terminal
        else Console(stderr=to_stderr, highlight=False, width=WIDTH, soft_wrap=True)
    )


_WORDS = {
    0: ("PASS", "bold green reverse"),
    1: ("FAIL", "bold red reverse"),
    4: ("INCONCLUSIVE", "bold yellow reverse"),
}


def _summary(run: str, monitor: "RunMonitor") -> Text:
    status, style = _WORDS[monitor.exit_code]
    counts = f"{monitor.steps:,} steps, {monitor.failed:,} failed"
    if monitor.inconclusive:
        counts += f", {monitor.inconclusive:,} with nothing compared"
    return Text.assemble((f" {status} ", style), " ", line(f"{run}: {counts}"))
