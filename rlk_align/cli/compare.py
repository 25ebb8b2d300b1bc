"""`rlk-align compare`: the main job."""

from typing import Annotated

import typer

from rlk_align.cli import options
from rlk_align.cli.pair import Pair, prepare, prepare_without, takes_pair
from rlk_align.progress import show_progress


@takes_pair
def compare(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN_A RUN_B]", help="Two captures made earlier, to compare."),
    ] = None,
    *,
    given: Pair,
    probe: Annotated[
        bool, typer.Option("--probe", help="Also run each engine on the other's inputs.")
    ] = False,
    attribute: options.Attribute = False,
) -> None:
    """Load one model into both engines, score the same tokens, compare every operator."""
    request, run, outputs = prepare(given, runs)
    without = prepare_without(given, run)

    from rlk_align import pipeline
    from rlk_align.cli.output import finish

    found = None
    with show_progress("compare") as progress:
        beside = None
        if without is not None:
            beside = pipeline.compare(*without, progress), without[1]
        verdict = pipeline.compare(request, run, progress)
        if (probe or attribute) and not verdict.comparison.stopped:
            kept = options.trace_plan(given.trace_budget, given.layers, given.sites)
            asked = pipeline.ProbeRequest(attribute=attribute, contract=given.contract, plan=kept)
            verdict, found = pipeline.probe(asked, run.again(), progress)
    finish(verdict, run, outputs, found, beside)
