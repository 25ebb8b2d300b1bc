"""Graft passes: each engine of a run computes again, on the other's recorded inputs and on its own.

At every site the live value is recorded and then overwritten by the recorded one, so one forward
gives each unit's output on recorded inputs. X(xY) is engine X on Y's inputs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlk_align.capture.intervene import intervene, source_of
from rlk_align.capture.request import TracePlan
from rlk_align.engines.common.intervention import Intervention
from rlk_align.engines.registry import engine_info
from rlk_align.errors import BadOption
from rlk_align.model.edges import EDGE_ENDS
from rlk_align.model.prompts import TokenBatch
from rlk_align.model.shape import ModelShape
from rlk_align.model.sites import model_sites
from rlk_align.probe.graph import late_sites
from rlk_align.progress import Progress
from rlk_align.results import EdgeName, SideName
from rlk_align.trace.reader import PassReader, Trace
from rlk_align.trace.run import Run

End = tuple[SideName, str]
"""A side and its pass."""


@dataclass(frozen=True, slots=True)
class GraftedEnd:
    """One end of an edge: engine X in one of its passes. Y is the engine at the other end."""

    side: SideName
    passname: str
    captured: PassReader
    """X(xX), as captured."""
    self_grafted: PassReader
    """X(xX) in a graft pass. X(xY) is valid only if this pass reproduces the capture bitwise."""
    cross_grafted: PassReader
    """X(xY)."""


@dataclass(frozen=True, slots=True)
class GraftedEdge:
    """An edge with its graft passes."""

    name: EdgeName
    first: GraftedEnd
    second: GraftedEnd
    tokens: TokenBatch
    shape: ModelShape
    fused: frozenset[tuple[str, str]]
    """Pairs of operators that one of the run's engines fuses."""


def traces_of(run: Run) -> dict[SideName, Trace]:
    """Returns both sides of a finished comparison. Raises BadOption for a single capture."""
    if not run.record.judged:
        raise BadOption(
            f"{run.folder} is a single capture: there is nothing to probe",
            "compare it with another: rlk-align compare RUN_A RUN_B",
        )
    return {
        "rollout": Trace(run.capture_folder("rollout")),
        "train": Trace(run.capture_folder("train")),
    }


def check_alike(run: Run, traces: Mapping[SideName, Trace]) -> None:
    """Raises BadOption if the sides differ in their token ids or in their sites' shapes."""
    rollout, train = traces["rollout"], traces["train"]
    ids = [[s.ids for s in t.tokens.samples] for t in (rollout, train)]
    differs = {
        "token ids": ids[0] != ids[1],
        "shapes": model_sites(rollout.record.shape) != model_sites(train.record.shape),
    }
    for what, is_so in differs.items():
        if is_so:
            raise BadOption(
                f"{run.folder}: the sides differ in their {what}: neither side's values can be "
                "put into the other",
                "compare them again with the same ids and models of one shape",
            )


def fused_pairs(traces: Iterable[Trace]) -> frozenset[tuple[str, str]]:
    """Returns the pairs of operators that one of these engines fuses."""
    return frozenset(pair for t in traces for pair in engine_info(t.record.engine).fused)


def graft_passes(
    run: Run, edges: Sequence[EdgeName], progress: Progress, plan: TracePlan | None = None
) -> list[GraftedEdge]:
    """Returns the graft passes of these edges. Each engine runs in one process; passes that exist
    already are reused. An engine needs two forwards for one edge, and at most six for all.

    Raises BadOption if the run lacks a pass of an edge, MissingDependency or ModelError if an
    engine or a model of the run is not on this machine, and what the engines raise.
    """
    traces = traces_of(run)
    for edge in edges:
        for side, passname in EDGE_ENDS[edge]:
            if not traces[side].has_pass(passname):
                raise BadOption(f"{run.folder}: the {side} capture has no {passname} pass")
    check_alike(run, traces)
    fused = fused_pairs(traces.values())
    tokens, shape = traces["rollout"].tokens, traces["rollout"].record.shape
    late = late_sites(model_sites(shape), fused)
    grafted: dict[tuple[End, End], PassReader] = {}
    for side, trace in traces.items():
        pairs = _pairs(edges, side)
        if not pairs:
            continue
        wanted = {
            str(number): (
                here[1],
                Intervention(kind="graft", source=source_of(traces[s].read_pass(p)), late=late),
            )
            for number, (here, (s, p)) in enumerate(pairs)
        }
        passes = intervene(trace, side, run, wanted, plan or TracePlan(), progress)
        grafted |= {pair: passes[str(number)] for number, pair in enumerate(pairs)}

    def end(here: End, there: End) -> GraftedEnd:
        captured = traces[here[0]].read_pass(here[1])
        return GraftedEnd(*here, captured, grafted[here, here], grafted[here, there])

    grafted_edges = []
    for name in edges:
        one, two = EDGE_ENDS[name]
        grafted_edges.append(GraftedEdge(name, end(one, two), end(two, one), tokens, shape, fused))
    return grafted_edges


def _pairs(edges: Sequence[EdgeName], side: SideName) -> list[tuple[End, End]]:
    """Lists (pass of this engine, pass whose recorded inputs it reads)."""
    pairs: dict[tuple[End, End], None] = {}
    for edge in edges:
        one, two = EDGE_ENDS[edge]
        for here, there in ((one, two), (two, one)):
            if here[0] == side:
                pairs |= {(here, here): None, (here, there): None}
    return list(pairs)
