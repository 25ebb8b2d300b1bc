"""`rlk-align compare`: the main job."""

from typing import Annotated

import typer

from rlk_align.cli import options
from rlk_align.config import CaptureRequest, EngineSpec, resolve_model
from rlk_align.contract import default_contract, load_contract, lower_precision
from rlk_align.errors import BadOption


def compare(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN_A RUN_B]", help="Two captures made earlier, to compare."),
    ] = None,
    model: options.Model = None,
    rollout: Annotated[
        str | None,
        typer.Option(help="Rollout engine, NAME[:key=value,...].  [default: vllm, else hf]"),
    ] = None,
    train: Annotated[
        str | None,
        typer.Option(help="Training engine, NAME[:key=value,...].  [default: megatron, else hf]"),
    ] = None,
    prompts: options.Prompts = None,
    contract: options.ContractName = None,
    max_new_tokens: options.MaxNewTokens = 32,
    seed: options.Seed = 0,
    run_dir: options.RunDir = None,
    output: options.Output = None,
    allow_mismatch: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND", help="Measure across: tokens, weights or attributes."),
    ] = None,
    fresh: options.Fresh = False,
    layers: options.Layers = None,
    sites: options.Sites = None,
    edges: Annotated[
        str | None, typer.Option(metavar="E,...", help="Edges to judge.  [default: all three]")
    ] = None,
    production: Annotated[
        bool | None,
        typer.Option(help="Also score in the rollout engine's compiled mode.  [default: on GPUs]"),
    ] = None,
    trace_budget: options.TraceBudget = "8GB",
) -> None:
    """Load one model into both engines, score the same tokens, compare every operator."""
    judged = options.parse_edges(edges)
    outputs = options.parse_outputs(output)
    plan = options.trace_plan(trace_budget, layers, sites)
    allowed = options.parse_kinds(allow_mismatch)
    if runs:
        given = [model, rollout, train, prompts]
        if len(runs) != 2 or any(g is not None for g in given):
            raise BadOption(
                "two runs are compared as they are: RUN_A RUN_B, without engines, model or prompts"
            )
        pair = [EngineSpec("replay", {"path": run}) for run in runs]
    else:
        named = (rollout or options.default_rollout(), train or options.default_train())
        pair = [EngineSpec.parse(text) for text in named]
    specs = dict(zip(("rollout", "train"), pair, strict=True))
    settings = (model, str(prompts), max_new_tokens, seed, str(specs["rollout"]))
    run = options.choose_run(run_dir, "compare", *settings, str(specs["train"]))

    from rlk_align.cli.progress import progress
    from rlk_align.comparison import passes_for

    requests = {
        side: options.capture_request(
            spec,
            model,
            prompts,
            max_new_tokens,
            seed,
            plan,
            passes_for(judged, side),
            side == "rollout" and _measure_production(production, spec),
        )
        for side, spec in specs.items()
    }
    _check_early(requests, contract, plan.sites)

    from rlk_align import pipeline
    from rlk_align.cli.output import finish

    request = pipeline.CompareRequest(
        rollout=requests["rollout"],
        train=requests["train"],
        judged=judged,
        contract=contract,
        allowed=allowed,
        fresh=fresh,
        command=tuple(options.command_line()),
    )
    with progress("compare") as report:
        verdict = pipeline.compare(request, run, report)
    finish(verdict, run, outputs)


def _measure_production(wanted: bool | None, spec: EngineSpec) -> bool:
    if spec.name == "replay":
        return False
    if wanted is not None:
        return wanted
    import torch

    return spec.name == "vllm" and torch.cuda.is_available()


def _check_early(
    requests: dict[str, CaptureRequest], contract: str | None, sites: tuple[str, ...]
) -> None:
    """What would fail after minutes of capturing fails now."""
    from rlk_align.engines.plan import check_selection
    from rlk_align.families import read_shape
    from rlk_align.sites import model_sites

    live = [r for r in requests.values() if r.engine.name != "replay"]
    if len(live) < 2:
        return
    dtypes = []
    for request in live:
        shape = read_shape(resolve_model(request.model_path))
        check_selection(sites, model_sites(shape))
        dtype = str(request.engine.options.get("dtype", "auto"))
        dtypes.append(shape.dtype if dtype == "auto" else dtype)
    dtype = lower_precision(*dtypes)
    load_contract(contract or default_contract(dtype), dtype)
