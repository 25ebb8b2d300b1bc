"""Routing replay: an engine computes each token with the experts that another pass chose.

The engine's own router still gives the weights of these experts. The differences that remain on an
edge are drift without routing; those that the replay removes come from routing.
"""

from collections.abc import Sequence

import numpy as np

from rlk_align.capture.intervene import intervene, source_of
from rlk_align.capture.request import TracePlan
from rlk_align.compare.controls import paired_logprobs
from rlk_align.compare.metrics import edge_metrics
from rlk_align.engines.common.intervention import Intervention
from rlk_align.errors import BadOption, EngineFailed
from rlk_align.model.edges import EDGE_ENDS
from rlk_align.model.shape import ModelShape
from rlk_align.model.sites import RowIndex, model_sites
from rlk_align.probe.graft import check_alike, traces_of
from rlk_align.probe.record import ReplayedEdge
from rlk_align.progress import Progress
from rlk_align.results import EdgeName, SideName
from rlk_align.trace.reader import PassReader
from rlk_align.trace.run import Run
from rlk_align.trace.values import RecordedRows

_PLAN = TracePlan(sites=("experts",))


def replay_routing(
    run: Run, edges: Sequence[EdgeName], progress: Progress
) -> tuple[ReplayedEdge, ...]:
    """For each of these edges on which tokens go to other experts, runs the second pass again with
    the experts of the first one.

    Raises BadOption for a dense model, or if the choice of experts was not recorded,
    MissingDependency or ModelError if an engine or a model of the run is not on this machine, and
    what the engines raise.
    """
    traces = traces_of(run)
    check_alike(run, traces)
    choices = choices_of(traces["rollout"].record.shape)
    if not choices:
        raise BadOption(
            f"{run.folder}: its model has no sparse layers, and so no routing to replay"
        )
    flipped = {e.name for e in run.comparison.edges if e.routing and e.routing.flipped_tokens}
    index = RowIndex(traces["rollout"].tokens)
    replays: dict[EdgeName, ReplayedEdge] = {}
    for side, trace in traces.items():
        wanted: dict[str, tuple[str, Intervention]] = {}
        first: dict[str, RecordedRows] = {}
        unreplayed: dict[str, RecordedRows] = {}
        for name in [e for e in edges if e in flipped and EDGE_ENDS[e][1][0] == side]:
            (other, source), (_, passname) = EDGE_ENDS[name]
            first[name] = RecordedRows(traces[other].read_pass(source), index)
            unreplayed[name] = RecordedRows(trace.read_pass(passname), index)
            _check_kept(run, first[name], choices)
            replay = Intervention(kind="graft", sites=choices, source=source_of(first[name].reader))
            wanted[name] = (passname, replay)
        passes = intervene(trace, side, run, wanted, _PLAN, progress) if wanted else {}
        for name in [e for e in edges if e in passes]:
            _check_replayed(name, first[name], passes[name], choices)
            replays[name] = _replayed(
                name, side, first[name], unreplayed[name], passes[name], choices
            )
    return tuple(replays[name] for name in edges if name in replays)


def choices_of(shape: ModelShape) -> tuple[str, ...]:
    """Returns the sites at which experts are chosen; a dense model has none."""
    return tuple(s.name for s in model_sites(shape) if s.op == "experts")


def _check_kept(run: Run, source: RecordedRows, choices: Sequence[str]) -> None:
    for site in choices:
        lost = int((source.present(site) & ~source.has_value(site)).sum())
        if lost:
            raise BadOption(
                f"{run.folder}: the experts of {lost:,} rows of {site} were not recorded, so they "
                "cannot be replayed",
                "compare again with a larger --trace-budget, or with experts among --sites",
            )


def _check_replayed(
    name: EdgeName, first: RecordedRows, replayed: PassReader, choices: Sequence[str]
) -> None:
    """Raises EngineFailed if the engine computed other experts than the replayed ones."""
    computed = RecordedRows(replayed, first.index)
    for site in choices:
        unlike = first.present(site) & (first.digests(site) != computed.digests(site)).any(axis=1)
        if unlike.any():
            raise EngineFailed(
                f"{name}: {int(unlike.sum()):,} rows of {site} were not computed by the replayed "
                "experts",
                "check what a patch does to the router",
            )


def _replayed(
    name: EdgeName,
    side: SideName,
    first: RecordedRows,
    unreplayed: RecordedRows,
    replayed: PassReader,
    choices: Sequence[str],
) -> ReplayedEdge:
    index = first.index
    number, before, after = paired_logprobs(first.reader, replayed, index)
    flipped = np.zeros(len(index), dtype=bool)
    for site in choices:
        both = first.present(site) & unreplayed.present(site)
        flipped |= both & (first.digests(site) != unreplayed.digests(site)).any(axis=1)
    rest, of = np.abs(after.astype(np.float64) - before), flipped[number]
    return ReplayedEdge(
        name=name,
        side=side,
        rows=sum(replayed.record.overwritten.get(site, 0) for site in choices),
        rest=edge_metrics(before, after),
        routing=edge_metrics(*paired_logprobs(replayed, unreplayed.reader, index)[1:]),
        mean_abs_rest_flipped=float(rest[of].mean()) if of.any() else 0.0,
        mean_abs_rest_other=float(rest[~of].mean()) if (~of).any() else 0.0,
    )
