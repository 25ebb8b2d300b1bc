"""`rlk-align gate`: judge a run again; needs neither an engine nor a GPU."""

from typing import Annotated

import typer

from rlk_align.cli import options
from rlk_align.cli.output import finish
from rlk_align.errors import CorruptTrace
from rlk_align.judge.verdict import judge_by
from rlk_align.probe.record import Probe
from rlk_align.progress import show_progress
from rlk_align.results import Comparison
from rlk_align.trace.run import Run


def gate(
    run: Annotated[str, typer.Argument(help="A compared run's folder, or @last.")],
    contract: options.ContractName = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Compare the captures again; needs torch.")
    ] = False,
    output: options.Output = None,
) -> None:
    """Hold a compared run against a contract; the exit code is the gate.

    Every file of the run is compared with its checksum first; --recompute
    derives the comparison again from the captures.
    """
    outputs = options.parse_outputs(output)
    opened = Run.open(run)
    for path in outputs:
        opened.check_output(path)
    comparison = _recomputed(opened) if recompute else opened.comparison
    if not recompute:
        opened.check()
    finish(judge_by(comparison, contract), opened, outputs, opened.load_probe(Probe))


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
