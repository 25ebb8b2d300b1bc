"""A compared run -> which units introduced its differences or passed them on, and their effects."""

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
"""The site that is moved by one ulp to find amplifiers: every other operator follows it."""


def probe_run(
    run: Run, edges: Sequence[EdgeName], attributed: bool, plan: TracePlan, progress: Progress
) -> list[ProbedEdge]:
    """Runs the graft passes of these edges and decomposes their differences. If `attributed`, also
    measures what each introducer contributes to the log-probs. Raises what `graft_passes` raises,
    and ModelError for a sparse model, because the values inside its experts cannot be
    overwritten."""
    if Trace(run.capture_folder("rollout")).record.shape.experts:
        raise ModelError("what an engine computes inside sparse layers cannot be overwritten")
    probed = []
    for grafted in graft_passes(run, edges, progress, plan):
        units = decompose(grafted, progress)
        side, passname = EDGE_ENDS[grafted.name][1]
        probed.append(
            ProbedEdge(
                name=grafted.name,
                units=units,
                amplification=amplification(run, side, PERTURBED, progress, passname, plan),
                attribution=attribute(run, grafted, units, progress, plan) if attributed else None,
            )
        )
    return probed
