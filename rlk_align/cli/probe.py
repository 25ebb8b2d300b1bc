"""`rlk-align probe`: who introduced the differences of two engines, and do they matter?"""

from typing import Annotated

import typer

from rlk_align.cli import options
from rlk_align.cli.outputs import check_outputs, parse_outputs
from rlk_align.cli.pair import Pair, prepare, takes_pair
from rlk_align.errors import BadOption
from rlk_align.progress import show_progress
from rlk_align.trace.run import Run


@takes_pair
def probe(
    of: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="A compared run's folder, or @last.")
    ] = None,
    *,
    layerwise: Annotated[
        bool, typer.Option("--layerwise", help="Operator by operator, which is the only way.")
    ] = True,
    given: Pair,
    attribute: options.Attribute = False,
) -> None:
    """Run each engine on the other's recorded inputs: who introduced an error, who passed it on.

    A RUN goes on from its captures; engine flags compare first. With --layers only those are
    split; with --edges those, else the one that the verdict speaks of first.
    """
    kept = options.trace_plan(given.trace_budget, given.layers, given.sites)
    edges_asked = options.parse_edges(given.edges) if given.edges else ()
    if of is not None:
        # What a capture is asked for: given here, it would be left out of account.
        if given.gives("run_dir", "allow_mismatch"):
            raise BadOption(
                "a run is probed as it is: RUN, without engines, model, prompts, and whatever else "
                "a comparison is asked for"
            )
        run, request = Run.open(of), None
        outputs = parse_outputs(given.output)
        check_outputs(outputs, run)
    else:
        request, run, outputs = prepare(given)

    from rlk_align import pipeline
    from rlk_align.cli.output import finish

    with show_progress("probe") as progress:
        if request is not None:
            verdict = pipeline.compare(request, run, progress)
            if verdict.comparison.stopped:
                finish(verdict, run, outputs)
            run = run.again()
        asked = pipeline.ProbeRequest(
            edges=edges_asked, attribute=attribute, contract=given.contract, plan=kept
        )
        verdict, found = pipeline.probe(asked, run, progress)
    finish(verdict, run, outputs, found)
