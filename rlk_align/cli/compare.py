"""`rlk-align compare`: the main job."""

from typing import Annotated

import typer

from rlk_align.cli import options
from rlk_align.cli.pair import Pair, prepare, prepare_without
from rlk_align.progress import show_progress


def compare(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN_A RUN_B]", help="Two captures made earlier, to compare."),
    ] = None,
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
    probe: Annotated[
        bool, typer.Option("--probe", help="Also run each engine on the other's inputs.")
    ] = False,
    attribute: options.Attribute = False,
) -> None:
    """Load one model into both engines, score the same tokens, compare every operator."""
    given = Pair(
        runs=runs,
        model=model,
        rollout=rollout,
        train=train,
        prompts=prompts,
        contract=contract,
        max_new_tokens=max_new_tokens,
        seed=seed,
        run_dir=run_dir,
        output=output,
        allow_mismatch=allow_mismatch,
        fresh=fresh,
        layers=layers,
        sites=sites,
        edges=edges,
        production=production,
        trace_budget=trace_budget,
        kernels=kernels,
    )
    request, run, outputs = prepare(given)
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
            kept = options.trace_plan(trace_budget, layers, sites)
            asked = pipeline.ProbeRequest(attribute=attribute, contract=contract, plan=kept)
            verdict, found = pipeline.probe(asked, run.again(), progress)
    finish(verdict, run, outputs, found, beside)
