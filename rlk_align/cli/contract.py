"""`rlk-align contract`: shows, checks, compares and calibrates contracts."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from rlk_align.errors import EXIT_FAIL, BadOption, TraceNotWritten
from rlk_align.judge.changes import changes, needed_version, version_is_enough
from rlk_align.judge.contract import Contract
from rlk_align.judge.lint import lint
from rlk_align.judge.load import open_contract
from rlk_align.report.contract_terminal import show_contract
from rlk_align.text import line, printable
from rlk_align.trace.run import Run

if TYPE_CHECKING:
    from rlk_align.judge.calibrate import HealthyRun

app = typer.Typer(no_args_is_help=True, help="Show, check, compare and calibrate contracts.")
ContractArgument = Annotated[
    str, typer.Argument(metavar="CONTRACT", help="A built-in id, or a TOML file.")
]


@app.command()
def show(contract: ContractArgument) -> None:
    """Print the limits and budgets of a contract, the source of each, and its hash."""
    show_contract(open_contract(contract), Console(highlight=False, soft_wrap=True))


@app.command()
def check(contract: ContractArgument) -> None:
    """Check a contract: exit code 1 where a limit can never fire, contradicts another,
    lies below the measured values of healthy engines, or names sites that no model has."""
    opened = open_contract(contract)
    findings = lint(opened)
    for finding in findings:
        print(printable(f"{finding.entry or opened.id}: {finding.text}"))
    if findings:
        sys.exit(EXIT_FAIL)
    count = f"{len(opened.limits)} limits, {len(opened.budgets)} budgets"
    print(printable(f"{opened.id} {opened.version}: {count}, no finding"))


@app.command()
def diff(before: ContractArgument, after: ContractArgument) -> None:
    """List the differences between two contracts.

    The exit code is 1 if the second one is looser, or if its version is too low for the changes."""
    old, new = open_contract(before), open_contract(after)
    all_changes = changes(old, new)
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for change in all_changes:
        style = {"loosened": "bold red", "tightened": "green", "reworded": "dim"}[change.kind]
        # A reworded text is named and not printed.
        words = change.what if change.kind == "reworded" else str(change)
        table.add_row(line(change.kind, style), line(change.entry or "head"), line(words))
    Console(highlight=False, soft_wrap=True).print(table if all_changes else line("no difference"))
    if not version_is_enough(old, new, all_changes):
        need = needed_version(old, all_changes)
        print(printable(f"version {new.version}: these changes to {old.version} need {need}"))
        sys.exit(EXIT_FAIL)
    if any(change.kind == "loosened" for change in all_changes):
        sys.exit(EXIT_FAIL)


@app.command()
def schema() -> None:
    """Print the JSON Schema of contract files, for editors."""
    print(json.dumps(Contract.model_json_schema(), indent=1))


@app.command()
def calibrate(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Healthy runs that were compared.")
    ],
    base: Annotated[
        str, typer.Option(metavar="C", help="The contract for which new limits are proposed.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="PATH", help="Write the proposal to this TOML file."),
    ] = None,
) -> None:
    """Propose limits from repeated healthy runs: several seeds of each pair of engines."""
    from rlk_align.judge.calibrate import calibrated, proposal_lines

    if output is not None and os.environ.get("CI"):
        raise BadOption(
            "calibrate writes nothing under CI: limits change by review",
            "run it by hand, and propose its output in a pull request",
        )
    proposal = calibrated([healthy_run(name) for name in runs], open_contract(base))
    for text in proposal_lines(proposal):
        print(printable(text))
    if output is not None:
        try:
            output.write_text(proposal.toml, encoding="utf-8")
        except OSError as error:
            raise TraceNotWritten(f"{output} could not be written: {error}") from error


def healthy_run(name: str) -> "HealthyRun":
    """Loads a compared run. Raises BadOption for a run that compared nothing, and CorruptTrace for
    a damaged one."""
    import numpy as np

    from rlk_align.judge.calibrate import HealthyRun

    run = Run.open(name)
    comparison = run.comparison
    rows = run.rows(["edge", "first_logprob", "second_logprob"]).drop_null()
    first, second = (rows[n].to_numpy() for n in ("first_logprob", "second_logprob"))
    edge = np.array(rows["edge"].to_pylist())
    shifts = {e.name: np.abs(second - first)[edge == e.name] for e in comparison.edges}
    return HealthyRun(name, comparison, shifts)
