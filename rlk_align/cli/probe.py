"""`rlk-align probe`: finds the operators that introduce the differences, and their effect."""

from typing import Annotated

import typer

from rlk_align.api.options import parse_edges
from rlk_align.api.pair import Pair, prepare
from rlk_align.capture.request import TracePlan
from rlk_align.cli import options
from rlk_align.cli.flags import takes
from rlk_align.cli.outputs import check_outputs, parse_outputs
from rlk_align.errors import BadOption
from rlk_align.judge.contract import Contract
from rlk_align.judge.load import default_contract, load_contract
from rlk_align.progress import show_progress
from rlk_align.results import SideName
from rlk_align.trace.records import load_record
from rlk_align.trace.run import Run
from rlk_align.trace.schema import TraceRecord


@takes(Pair)
def probe(
    pair: Pair,
    of: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="A compared run's folder, or @last.")
    ] = None,
    *,
    layerwise: Annotated[
        bool,
        typer.Option(
            "--layerwise", help="Has no effect: a probe always works operator by operator."
        ),
    ] = True,
    output: options.Output = None,
    attribute: options.Attribute = False,
    replay_routing: options.ReplayRouting = False,
) -> None:
    """Run each engine on the other's inputs: which operators introduce errors, which inherit them?

    With a RUN, start from its captures; with engine flags, compare first. --layers and --edges
    restrict what is split; without --edges, the edge that the verdict names first is split.
    """
    plan = pair.plan
    requested_edges = parse_edges(pair.edges) if pair.edges else ()
    outputs, prepared = parse_outputs(output), None
    if of is not None:
        # Options of a capture would have no effect here.
        if pair.gives("run_dir", "allow_mismatch"):
            raise BadOption(
                "a run is probed as it is: give RUN without engines, model, prompts or other "
                "options of a comparison"
            )
        run = Run.open(of)
        contract = _check_probed(run, plan, pair.contract)
    else:
        prepared = prepare(pair, [], options.warn, options.command_line())
        prepared.check_replay(replay_routing)
        run, contract = prepared.run, prepared.contract
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


def _check_probed(run: Run, plan: TracePlan, name: str | None) -> Contract:
    """Returns the contract. Raises early what would fail later: BadOption for layers and sites that
    the run's model lacks, for a run that compared nothing, and for one with an imported side;
    ContractError; CorruptTrace."""
    from rlk_align.capture.check import check_trace_plan

    dtype = run.comparison.dtype
    contract = load_contract(name or default_contract(dtype), dtype)
    sides: tuple[SideName, ...] = ("rollout", "train")
    traces = [load_record(TraceRecord, run.capture_folder(s) / "trace.json") for s in sides]
    for side, trace in zip(sides, traces, strict=True):
        if trace.imported:
            raise BadOption(
                f"{run.folder}: its {side} side was imported from files of {trace.imported}, and a "
                "probe runs both engines",
                "capture that side, or record it by rlk_align.record",
            )
    check_trace_plan(plan, traces[0].shape)
    return contract
