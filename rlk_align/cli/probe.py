"""`rlk-align probe`: who introduced the differences of two engines, and do they matter?"""

from typing import Annotated

import typer

from rlk_align.api.options import from_arguments, parse_edges
from rlk_align.api.pair import Pair, prepare
from rlk_align.cli import options
from rlk_align.cli.outputs import check_outputs, parse_outputs
from rlk_align.errors import BadOption
from rlk_align.progress import show_progress
from rlk_align.trace.run import Run


def probe(
    of: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="A compared run's folder, or @last.")
    ] = None,
    *,
    layerwise: Annotated[
        bool,
        typer.Option("--layerwise", help="Operator by operator, as a probe always does."),
    ] = True,
    model: options.Model = None,
    rollout: options.Rollout = None,
    train: options.Train = None,
    prompts: options.Prompts = None,
    contract: options.ContractName = None,
    kernels: options.Kernels = None,
    max_new_tokens: options.MaxNewTokens = 32,
    seed: options.Seed = 0,
    run_dir: options.RunDir = None,
    output: options.Output = None,
    allow_mismatch: options.AllowMismatch = None,
    fresh: options.Fresh = False,
    layers: options.Layers = None,
    sites: options.Sites = None,
    edges: options.Edges = None,
    production: options.Production = None,
    trace_budget: options.TraceBudget = "8GB",
    attribute: options.Attribute = False,
    replay_routing: options.ReplayRouting = False,
) -> None:
    """Run each engine on the other's inputs: which operators introduce, which inherit an error.

    With a RUN, start from its captures; with engine flags, compare first. --layers and --edges
    restrict what is split; without --edges, the edge that the verdict names first is split.
    """
    pair = from_arguments(Pair, locals())
    plan = pair.plan
    requested_edges = parse_edges(edges) if edges else ()
    outputs, prepared = parse_outputs(output), None
    if of is not None:
        # What a capture is asked for: given here, it would be left out of account.
        if pair.gives("run_dir", "allow_mismatch"):
            raise BadOption(
                "a run is probed as it is: give RUN without engines, model, prompts or other "
                "options of a comparison"
            )
        run = Run.open(of)
    else:
        prepared = prepare(pair, [], options.warn, options.command_line())
        prepared.check_replay(replay_routing)
        run = prepared.run
    check_outputs(outputs, run)

    from rlk_align import pipeline
    from rlk_align.cli.finish import finish, finish_too_few

    if prepared is not None and prepared.too_few_tokens:
        finish_too_few(prepared, outputs)
    with show_progress("probe") as progress:
        if prepared is not None:
            verdict = prepared.start(progress)
            if verdict.comparison.stopped:
                finish(verdict, run, outputs)
            run = run.reopened()
        request = pipeline.ProbeRequest(
            edges=requested_edges,
            attribute=attribute,
            replay_routing=replay_routing,
            contract=contract,
            plan=plan,
        )
        verdict, probed = pipeline.probe(request, run, progress)
    finish(verdict, run, outputs, probed)
