"""`rlk-align compare`: compares two engines, operator by operator."""

from typing import Annotated

import typer

from rlk_align.api.compare_choice import ImportedAlone, choose
from rlk_align.api.options import check_kernels
from rlk_align.api.pair import Pair, PreparedPair, prepare, without_kernels
from rlk_align.cli import options
from rlk_align.cli.explain import explain
from rlk_align.cli.flags import takes
from rlk_align.cli.outputs import check_outputs, parse_outputs
from rlk_align.errors import BadOption, ModelError
from rlk_align.progress import labelled, show_progress

WITHOUT = "kernels-off"
"""The folder, inside a run with the kernels, of the run of the same engines without them."""


@takes(Pair)
def compare(
    pair: Pair,
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN_A RUN_B]",
            help="Two captures made earlier, or one imported run, which holds both sides.",
        ),
    ] = None,
    *,
    output: options.Output = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Also run each engine on the other's inputs.")
    ] = False,
    attribute: options.Attribute = False,
    replay_routing: options.ReplayRouting = False,
    modules: Annotated[
        bool,
        typer.Option(
            "--modules", help="Compare any model, module by module; the verdict is never PASS."
        ),
    ] = False,
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
    steps: Annotated[
        str | None,
        typer.Option(
            "--steps",
            metavar="N,M,...",
            help="Compare these steps of two recorded sides, as a table.",
            show_default="the last common one",
        ),
    ] = None,
) -> None:
    """Load one model into both engines, score the same tokens, compare every operator.

    With --tokens, the engines of --rollout, --train or both score the token ids of a training
    run again, and its mismatch is split into decode, the engines' kernels and the trainer.
    An imported run alone is judged as `explain` judges it.
    """
    check_kernels(pair.kernels)
    if modules:
        from rlk_align.cli.modules import compare_modules

        flags = {"probe": probe, "attribute": attribute, "replay-routing": replay_routing}
        others = [
            f"--{n}" for n, given in (flags | {"tokens": tokens is not None}).items() if given
        ]
        compare_modules(pair, runs or [], others, output)
    if steps is not None:
        _check_alone(probe, attribute, replay_routing, tokens is not None)
        from rlk_align.cli.steps import compare_steps

        compare_steps(pair, runs or [], steps, output)
    probes = [n for n, given in {"probe": probe, "attribute": attribute}.items() if given]
    asked = choose(pair, runs or [], tokens, sequences, probes)
    if isinstance(asked, ImportedAlone):
        explain(asked.run, asked.contract, output)
    if not isinstance(asked, Pair):
        from rlk_align.cli.rescore import rescore

        rescore(asked, output)
    outputs, command = parse_outputs(output), options.command_line()
    prepared = prepare(pair, runs or [], options.warn, command)
    prepared.check_replay(replay_routing)
    check_outputs(outputs, prepared.run)

    from rlk_align import pipeline
    from rlk_align.cli.finish import finish, finish_too_few

    if prepared.too_few_tokens:
        finish_too_few(prepared, outputs)
    plain = without_kernels(pair, prepared.run.folder / WITHOUT)
    without = _prepared_beside(plain, command) if plain else None
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
                contract=prepared.contract,
                plan=pair.plan,
            )
            verdict, probed = pipeline.probe(request, prepared.run.reopened(), progress)
    finish(verdict, prepared.run, outputs, probed, beside)


def _check_alone(*others: bool) -> None:
    """Raises BadOption where `--steps` is combined with a flag that looks at one comparison."""
    if any(others):
        raise BadOption(
            "--steps makes a table of verdicts: --probe, --attribute, --replay-routing and "
            "--tokens look at one comparison",
            "compare one step with them: give the folder of that step of each side",
        )


def _prepared_beside(plain: Pair, command: list[str]) -> PreparedPair | None:
    """The comparison without the kernels; None, with a warning, for a model that an engine computes
    with them only, or with another setting."""
    try:
        return prepare(plain, [], options.warn, command)
    except (ModelError, BadOption) as refused:
        # `prepare` has accepted the same model and settings with the kernels.
        options.warn(f"nothing is compared without the kernels: {refused.message}")
        return None
