"""Amplifiers: how an engine answers when one site is moved by its own rounding's size."""

from collections.abc import Sequence

import numpy as np
import torch

from rlk_align.capture.intervene import intervene
from rlk_align.capture.request import TracePlan
from rlk_align.engines.common.edits import Editor
from rlk_align.engines.common.intervention import Intervention
from rlk_align.errors import BadOption
from rlk_align.model.sites import RowIndex, Site, model_sites
from rlk_align.probe.graft import fused_pairs, traces_of
from rlk_align.probe.graph import UnitGraph, unit_graphs
from rlk_align.probe.perturbation_record import Amplification, Response
from rlk_align.progress import Progress
from rlk_align.results import SideName
from rlk_align.trace.reader import PassReader, Trace
from rlk_align.trace.run import Run
from rlk_align.trace.values import RecordedRows

Distance = dict[str, tuple[float, float]]
"""Site -> squares of its difference and of its value, over all rows of which both are kept."""


def amplification(
    run: Run,
    side: SideName,
    perturbed: Sequence[str],
    progress: Progress,
    passname: str = "prefill",
    ulps: int = 1,
    seed: int = 0,
    plan: TracePlan | None = None,
) -> list[Amplification]:
    """The response of one engine to a perturbation of each of these sites in turn, a forward each.

    Raises BadOption for what is not a site, or for a pass that the capture lacks.
    """
    trace = traces_of(run)[side]
    sites = {s.name: s for s in model_sites(trace.record.shape)}
    for name in perturbed:
        if name not in sites or name == "logprob":
            raise BadOption(f"{name!r} is not a site that can be perturbed", "e.g. embed")
    if not trace.has_pass(passname):
        raise BadOption(f"{run.folder}: the {side} capture has no {passname} pass")
    plans = {n: Intervention(kind="perturb", sites=(n,), ulps=ulps, seed=seed) for n in perturbed}
    wanted = {name: (passname, intervention) for name, intervention in plans.items()}
    passes = intervene(trace, side, run, wanted, plan or TracePlan(), progress)
    captured = trace.read_pass(passname)
    return [_response(trace, side, captured, passes[n], n, plans[n], sites) for n in perturbed]


def _response(
    trace: Trace,
    side: SideName,
    captured: PassReader,
    moved: PassReader,
    name: str,
    intervention: Intervention,
    sites: dict[str, Site],
) -> Amplification:
    index = RowIndex(trace.tokens)
    before, after = RecordedRows(captured, index), RecordedRows(moved, index)
    editor = Editor(intervention, trace.tokens)
    distance: Distance = {}
    for site in sites:
        number = np.flatnonzero(before.has_value(site) & after.has_value(site))
        if not len(number):
            continue
        value = before.values(site, number)
        if site == name:
            # It was recorded before it was moved.
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
        perturbed=name,
        ulps=intervention.ulps,
        seed=intervention.seed,
        rel_l2=_relative(distance, [name]),
        responses=[r for g in graphs if (r := _of_unit(g, distance, name)) is not None],
        mean_abs_dlogp=float(dlogp.mean()) if len(dlogp) else float("nan"),
        max_abs_dlogp=float(dlogp.max()) if len(dlogp) else float("nan"),
    )


def _of_unit(graph: UnitGraph, distance: Distance, perturbed: str) -> Response | None:
    """The response of a unit; None where its inputs are not perturbed."""
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
