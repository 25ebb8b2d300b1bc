"""`rlk-align compare`: the main job."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from rlk_align.capture.request import CaptureRequest
from rlk_align.cli import options
from rlk_align.engines.spec import EngineSpec, replay_path
from rlk_align.errors import BadOption
from rlk_align.judge.contract import default_contract, load_contract
from rlk_align.model.dtypes import lower_precision
from rlk_align.model.edges import passes_for
from rlk_align.progress import show_progress
from rlk_align.results import SideName
from rlk_align.trace.records import load_record
from rlk_align.trace.run import Run
from rlk_align.trace.schema import TraceRecord


def compare(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN_A RUN_B]", help="Two captures made earlier, to compare."),
    ] = None,
    model: options.Model = None,
    rollout: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="Rollout engine, NAME[:key=value,...].",
            show_default="vllm, else hf",
        ),
    ] = None,
    train: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="Training engine, NAME[:key=value,...].",
            show_default="megatron, else hf",
        ),
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
        str | None, typer.Option(metavar="E,...", help="Edges to judge.", show_default="all three")
    ] = None,
    production: Annotated[
        bool | None,
        typer.Option(
            help="Also score in the rollout engine's compiled mode.", show_default="on GPUs"
        ),
    ] = None,
    trace_budget: options.TraceBudget = "8GB",
) -> None:
    """Load one model into both engines, score the same tokens, compare every operator."""
    judged = options.parse_edges(edges)
    outputs = options.parse_outputs(output)
    plan = options.trace_plan(trace_budget, layers, sites)
    allowed = options.parse_kinds(allow_mismatch)
    if runs:
        # What a capture is asked for: given here, it would be left out of account.
        named = (model, rollout, train, prompts, layers, sites, production)
        asked = any(n is not None for n in named) or fresh or seed or max_new_tokens != 32
        if len(runs) != 2 or asked:
            raise BadOption(
                "two runs are compared as they are: RUN_A RUN_B, without engines, model, prompts, "
                "and whatever else a capture is asked for"
            )
        pair = [EngineSpec("replay", {"path": run}) for run in runs]
    else:
        texts = (rollout or options.default_rollout(), train or options.default_train())
        pair = [EngineSpec.parse(text) for text in texts]
    specs: dict[SideName, EngineSpec] = {"rollout": pair[0], "train": pair[1]}
    settings = (model, str(prompts), max_new_tokens, seed, str(specs["rollout"]))
    run = options.choose_run(run_dir, "compare", *settings, str(specs["train"]))
    replays = _check_replays(specs, run)
    if prompts is None and replays:
        # The other side's tokenizer is asked the same.
        prompts = next(iter(replays.values())) / "prompts.jsonl"
    for path in outputs:
        run.check_output(path)

    requests = {
        side: options.capture_request(
            spec,
            model,
            prompts,
            max_new_tokens,
            seed,
            plan,
            # A side that no edge needs is scored too: its weights and tokens are the precheck's.
            passes_for(judged, side) or ("prefill",),
            side == "rollout" and _measure_production(production, spec),
        )
        for side, spec in specs.items()
    }
    _check_early(requests, replays, contract)

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
    with show_progress("compare") as progress:
        verdict = pipeline.compare(request, run, progress)
    finish(verdict, run, outputs)


def _measure_production(wanted: bool | None, spec: EngineSpec) -> bool:
    if spec.name == "replay":
        return False
    if wanted is not None:
        return wanted
    import torch

    return spec.info.compiles and torch.cuda.is_available()


def _check_replays(specs: Mapping[SideName, EngineSpec], run: Run) -> dict[SideName, Path]:
    """The traces that stand for engines. Raises BadOption where one lies in the run to be made."""
    found: dict[SideName, Path] = {}
    for side, spec in specs.items():
        if spec.name == "replay":
            source = Run.open(replay_path(spec))
            if source.folder.resolve() == run.folder.resolve():
                raise BadOption(
                    f"{run.folder} is one of the runs to be compared, and would be written over",
                    "name another --run-dir",
                )
            found[side] = source.capture_folder(side)
    return found


def _check_early(
    requests: Mapping[SideName, CaptureRequest],
    replays: Mapping[SideName, Path],
    contract: str | None,
) -> None:
    """What would fail after minutes of capturing fails now."""
    from rlk_align.capture.check import check_request

    dtypes = []
    for side, request in requests.items():
        if side in replays:
            dtypes.append(load_record(TraceRecord, replays[side] / "trace.json").dtype)
            continue
        shape, warnings = check_request(request, sampling=side == "rollout")
        options.warn(warnings)
        dtypes.append(request.engine.dtype(shape.dtype))
    dtype = lower_precision(*dtypes)
    load_contract(contract or default_contract(dtype), dtype)
