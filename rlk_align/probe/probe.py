"""A compared run -> who introduced its differences, who passed them on, and what they do."""

from collections.abc import Sequence

from rlk_align.capture.request import TracePlan
from rlk_align.errors import ModelError
from rlk_align.model.edges import EDGE_ENDS
from rlk_align.probe.attribute import attribute
from rlk_align.probe.decompose import decompose
from rlk_align.probe.graft import graft_passes
from rlk_align.probe.perturbation import amplification
from rlk_align.probe.record import ProbedEdge
from rlk_align.progress import Progress
from rlk_align.results import EdgeName
from rlk_align.trace.reader import Trace
from rlk_align.trace.run import Run

PERTURBED = "embed"
"""Moved by one ulp, to see what enlarges it: everything is behind it."""


def probe_run(
    run: Run, edges: Sequence[EdgeName], attributed: bool, plan: TracePlan, progress: Progress
) -> list[ProbedEdge]:
    """The graft passes of these edges and what follows from them; `attributed`: also what each
    introducer contributes to the log-probs. Raises what `graft_passes` raises, and ModelError
    for a sparse model: what happens inside its experts cannot be overwritten."""
    if Trace(run.capture_folder("rollout")).record.shape.experts:
        raise ModelError("what an engine computes inside sparse layers cannot be overwritten")
    probed = []
    for grafted in graft_passes(run, edges, progress, plan):
        units = decompose(grafted, progress)
        side, passname = EDGE_ENDS[grafted.name][1]
        moved = amplification(run, side, (PERTURBED,), progress, passname, plan=plan)
        probed.append(
            ProbedEdge(
                name=grafted.name,
                units=units,
                amplification=moved[0],
                attribution=attribute(run, grafted, units, progress, plan) if attributed else None,
            )
        )
    return probed
