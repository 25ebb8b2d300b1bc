"""`rlk-align gate`: judge a run again; needs neither an engine nor a GPU."""

from typing import Annotated, NoReturn

import typer

from rlk_align.cli import options
from rlk_align.cli.output import finish, finish_regression
from rlk_align.cli.outputs import Output, check_outputs, parse_outputs
from rlk_align.errors import BadOption, CorruptTrace
from rlk_align.judge.load import default_contract, load_contract
from rlk_align.judge.regression import judge_regression
from rlk_align.judge.verdict import judge_by
from rlk_align.probe.record import Probe
from rlk_align.progress import show_progress
from rlk_align.report.formats import FORMATS, REGRESSION_FORMATS
from rlk_align.results import Comparison
from rlk_align.trace.run import Run


def gate(
    run: Annotated[str, typer.Argument(help="A compared run's folder, or @last.")],
    later: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN_B]", help="A later run of the same: judge what became worse since RUN."
        ),
    ] = None,
    contract: options.ContractName = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Compare the captures again; needs torch.")
    ] = False,
    output: options.Output = None,
) -> None:
    """Hold a compared run against a contract; the exit code is the gate.

    Every file of the run is compared with its checksum first. Of a capture all
    but its checksums.json may be left behind; --recompute needs it whole, and
    derives the comparison again from it.
    With two runs the contract's regression limits say how much worse the second
    may be than the first.
    """
    outputs = parse_outputs(output, FORMATS if later is None else REGRESSION_FORMATS)
    opened = Run.open(run)
    if later is not None:
        if recompute:
            raise BadOption("--recompute is for one run", "gate each of them with it first")
        _compare_runs(opened, Run.open(later), contract, outputs)
    check_outputs(outputs, opened)
    comparison = _recomputed(opened) if recompute else opened.comparison
    if not recompute:
        opened.check()
    finish(judge_by(comparison, contract), opened, outputs, opened.load_probe(Probe))


def _compare_runs(first: Run, second: Run, name: str | None, outputs: list[Output]) -> NoReturn:
    """Says what became worse, and exits with the code for it."""
    runs = (first, second)
    for run in runs:
        run.check()
        check_outputs(outputs, run)
    before, after = (run.comparison for run in runs)
    contract = load_contract(name or default_contract(after.dtype), after.dtype)
    finish_regression(judge_regression(before, after, contract), runs, outputs)


def _recomputed(run: Run) -> Comparison:
    from rlk_align.pipeline import recompute

    with show_progress("gate") as progress:
        found = recompute(run, progress)
    try:
        if run.comparison.model_dump_json() != found.model_dump_json():
            options.warn(["comparison.json says otherwise than its captures; they are judged"])
    except CorruptTrace as error:
        options.warn([f"{error.message}; the captures are judged"])
    return found
