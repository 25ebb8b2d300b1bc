"""`rlk-align gate`: judges a run again; needs neither an engine nor a GPU."""

from contextlib import nullcontext
from typing import Annotated

import typer

from rlk_align.api.judging import judge_again, judge_later, open_runs
from rlk_align.cli import options
from rlk_align.cli.explain import explain
from rlk_align.cli.finish import finish, finish_regression
from rlk_align.cli.outputs import check_outputs, parse_outputs
from rlk_align.logs.diagnose.contract import RUN_CONTRACT
from rlk_align.probe.record import Probe
from rlk_align.progress import show_progress, silent
from rlk_align.report.formats import FORMATS, REGRESSION_FORMATS
from rlk_align.trace.run import is_imported


def gate(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A compared or an imported run's folder, or @last."),
    ],
    later: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN_B]",
            help="A later run of the same engines, to judge what became worse since RUN.",
        ),
    ] = None,
    contract: options.ContractName = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Compare the captures again; needs torch.")
    ] = False,
    output: options.Output = None,
) -> None:
    """Judge a compared run by a contract; the exit code is the gate.

    Every file of the run is checked against its checksum first. Captures may be
    missing, except for their checksums.json. --recompute needs complete captures
    and compares them again.
    An imported run is judged as by `explain`, with the contract for runs.
    With two runs, the contract's regression limits bound how much worse the second
    may be than the first.
    """
    outputs = parse_outputs(output, FORMATS if later is None else REGRESSION_FORMATS)
    if later is None and not recompute and is_imported(run):
        explain(run, contract or RUN_CONTRACT, output)
    first, second = open_runs(run, later, recompute)
    check_outputs(outputs, first)
    if second is not None:
        check_outputs(outputs, second)
        finish_regression(judge_later(first, second, contract), (first, second), outputs)
    with show_progress("gate") if recompute else nullcontext(silent) as progress:
        verdict = judge_again(first, contract, recompute, progress, options.warn)
    finish(verdict, first, outputs, first.load_probe(Probe))
