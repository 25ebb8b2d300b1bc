"""Amplifiers: how an engine responds if one site is moved by the size of its own rounding."""

import numpy as np
import torch

from rlk_align.capture.intervene import intervene
from rlk_align.capture.request import TracePlan
from rlk_align.engines.common.edits import Editor
from rlk_align.engines.common.intervention import Intervention
from rlk_align.errors import BadOption
from rlk_align.model.sites import RowIndex, model_sites
from rlk_align.probe.graft import fused_pairs, traces_of
from rlk_align.probe.graph import UnitGraph, unit_graphs
from rlk_align.probe.perturbation_record import Amplification, Response
from rlk_align.progress import Progress
from rlk_align.results import SideName
from rlk_align.trace.run import Run
from rlk_align.trace.values import RecordedRows

Distance = dict[str, tuple[float, float]]
"""Site -> the sums of squares of its difference and of its value, over all rows for which both are
recorded."""


def amplification(
    run: Run,
    side: SideName,
    perturbed: str,
    progress: Progress,
    passname: str = "prefill",
    plan: TracePlan | None = None,
) -> Amplification:
    """Returns the response of one engine to a perturbation of one site by an ulp.

    Raises BadOption if the site cannot be perturbed, or if the capture lacks the pass.
    """
    trace = traces_of(run)[side]
    sites = {s.name: s for s in model_sites(trace.record.shape)}
    if perturbed not in sites or perturbed == "logprob":
        raise BadOption(f"{perturbed!r} is not a site that can be perturbed", "e.g. embed")
    if not trace.has_pass(passname):
        raise BadOption(f"{run.folder}: the {side} capture has no {passname} pass")
    intervention = Intervention(kind="perturb", sites=(perturbed,), ulps=1, seed=0)
    wanted = {perturbed: (passname, intervention)}
    passes = intervene(trace, side, run, wanted, plan or TracePlan(), progress)
    index = RowIndex(trace.tokens)
    captured = trace.read_pass(passname)
    before, after = RecordedRows(captured, index), RecordedRows(passes[perturbed], index)
    editor = Editor(intervention, trace.tokens)
    distance: Distance = {}
    for site in sites:
        number = np.flatnonzero(before.has_value(site) & after.has_value(site))
        if not len(number):
            continue
        value = before.values(site, number)
        if site == perturbed:
            # Its rows were recorded before they were moved.
            now, _ = editor(site, value, index.sample[number], index.position[number], 0)
        else:
            now = after.values(site, number)
        far = (now.double() - value.double()).square().sum()
        distance[site] = float(far), float(value.double().square().sum())
    hidden = [s for s in sites if s not in distance]
    graphs = unit_graphs(sites.values(), fused_pairs([trace]), hidden)
    dlogp = _dlogp(before, after)
    return Amplification(
        side=side,
        passname=captured.folder.name,
        perturbed=perturbed,
        ulps=intervention.ulps,
        seed=intervention.seed,
        rel_l2=_relative(distance, [perturbed]),
        responses=[r for g in graphs if (r := _of_unit(g, distance, perturbed)) is not None],
        mean_abs_dlogp=float(dlogp.mean()) if len(dlogp) else float("nan"),
        max_abs_dlogp=float(dlogp.max()) if len(dlogp) else float("nan"),
    )


def _of_unit(graph: UnitGraph, distance: Distance, perturbed: str) -> Response | None:
    """The response of a unit; None if its inputs are not perturbed."""
    inputs = _relative(distance, list(dict.fromkeys(graph.inputs + graph.prefix_inputs)))
    if inputs == 0:
        return None
    outputs = [s.name for s in graph.sites if s.name != perturbed]
    rel_l2 = max((_relative(distance, [s]) for s in outputs), default=0.0)
    return Response(name=graph.name, rel_l2=rel_l2, inputs_rel_l2=inputs)


def _relative(distance: Distance, sites: list[str]) -> float:
    far, norm = (sum(distance[s][i] for s in sites) for i in (0, 1))
    return (far / norm) ** 0.5 if norm else float(far > 0)


def _dlogp(before: RecordedRows, after: RecordedRows) -> np.ndarray:
    number = np.flatnonzero(before.has_value("logprob") & after.has_value("logprob"))
    values: list[torch.Tensor] = [r.values("logprob", number) for r in (before, after)]
    return (values[1].double() - values[0].double()).abs()[:, 0].numpy()
