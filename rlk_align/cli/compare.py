"""`rlk-align compare`: the main job."""

import shlex
from dataclasses import replace
from typing import Annotated, NoReturn

import typer

from rlk_align.api.options import check_kernels, from_arguments
from rlk_align.api.pair import Pair, prepare, without_kernels
from rlk_align.cli import options
from rlk_align.cli.explain import explain
from rlk_align.cli.outputs import check_outputs, parse_outputs
from rlk_align.errors import BadOption
from rlk_align.logs.diagnose.contract import RUN_CONTRACT
from rlk_align.progress import labelled, show_progress
from rlk_align.trace.run import is_imported

WITHOUT = "kernels-off"
"""The folder, in a run with the kernels, of the run of the same pair without them."""


def compare(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN_A RUN_B]",
            help="Two captures made earlier, or one imported run, which holds both sides.",
        ),
    ] = None,
    *,
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
    replay_routing: options.ReplayRouting = False,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="DUMP",
            help="Score again the ids of an imported run or of a framework's dump.",
            show_default="sample",
        ),
    ] = None,
    sequences: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="How many sequences of --tokens to score: the worst N/2, and N/2 drawn by --seed.",
        ),
    ] = 64,
) -> None:
    """Load one model into both engines, score the same tokens, compare every operator.

    With --tokens, the engines of --rollout, --train or both score the token ids of a training
    run again, and its mismatch is split into decode, the engines' kernels and the trainer.
    An imported run alone is judged as `explain` judges it.
    """
    if tokens is not None:
        given = locals() | {"runs": runs or []}
        from rlk_align.api.rescoring import Rescoring
        from rlk_align.cli.rescore import rescore

        rescore(from_arguments(Rescoring, given), given, output)
    pair = from_arguments(Pair, locals())
    check_kernels(kernels)
    if runs and len(runs) == 1 and is_imported(runs[0]):
        _explain(runs[0], pair, probe or attribute, output)
    outputs, command = parse_outputs(output), options.command_line()
    prepared = prepare(pair, runs or [], options.warn, command)
    prepared.check_replay(replay_routing)
    check_outputs(outputs, prepared.run)

    from rlk_align import pipeline
    from rlk_align.cli.finish import finish, finish_too_few

    if prepared.too_few_tokens:
        finish_too_few(prepared, outputs)
    plain = without_kernels(pair, prepared.run.folder / WITHOUT)
    without = prepare(plain, [], options.warn, command) if plain else None
    probed = beside = None
    with show_progress("compare") as progress:
        if without is not None:
            beside = without.start(labelled(progress, "kernels off")), without.run
            progress = labelled(progress, "kernels rlk")
        verdict = prepared.start(progress)
        grafts = probe or attribute
        if (grafts or replay_routing) and not verdict.comparison.stopped:
            request = pipeline.ProbeRequest(
                grafts=grafts,
                attribute=attribute,
                replay_routing=replay_routing,
                contract=contract,
                plan=pair.plan,
            )
            verdict, probed = pipeline.probe(request, prepared.run.reopened(), progress)
    finish(verdict, prepared.run, outputs, probed, beside)


def _explain(run: str, pair: Pair, probed: bool, output: list[str] | None) -> NoReturn:
    """Judges an imported run, and exits. Raises BadOption for flags that ask for an engine."""
    if probed or replace(pair, contract=None) != Pair():
        raise BadOption(
            f"{run} is an imported run: compared alone, it takes --contract and --output",
            f"rlk-align compare --tokens {shlex.quote(run)} --train SPEC scores its ids again",
        )
    explain(run, pair.contract or RUN_CONTRACT, output)
