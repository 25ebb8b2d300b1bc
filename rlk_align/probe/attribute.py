"""Attribution: what each introducer contributes to the difference of the log-probs.

A is the edge's first engine, B its second, and a unit introduces the difference A(xA) - B(xA). Its
contribution is measured twice: as the first one, by adding the difference to B at that unit alone,
and as the last one, by removing it from A alone. Layers are measured first, then the units of the
layers that matter.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from rlk_align.capture.intervene import intervene, source_of
from rlk_align.capture.request import TracePlan
from rlk_align.engines.common.intervention import Intervention, RecordedPass
from rlk_align.model.sites import RowIndex, model_sites
from rlk_align.probe.attribution_record import Attribution, Contribution
from rlk_align.probe.graft import GraftedEdge, GraftedEnd, traces_of
from rlk_align.probe.graph import late_sites
from rlk_align.probe.unit_record import Unit
from rlk_align.progress import Progress
from rlk_align.results import SideName
from rlk_align.trace.reader import PassReader
from rlk_align.trace.run import Run
from rlk_align.trace.values import RecordedRows

OPENED = 0.8
"""The units of the largest layers are measured, of as many layers as have this share of the
contributions."""

Groups = Mapping[str, Sequence[Unit]]
"""Name -> units whose differences are added or removed together."""
EVERYTHING = "everything"


def attribute(
    run: Run,
    edge: GraftedEdge,
    units: Sequence[Unit],
    progress: Progress,
    plan: TracePlan | None = None,
) -> Attribution:
    """Returns the contributions of an edge's introducers; `units` are those of `decompose`.

    Each layer that introduces a difference, and each introducer in the layers that matter, takes a
    forward of each engine. Their number and an estimate of their time are reported first.
    """
    forwards = _Forwards(run, edge, plan or TracePlan(), progress)
    introducers = [u for u in units if u.orders and u.orders[0].introduced_rows]
    engines = [u for u in introducers if u.sites != ["logprob"]]
    groups = _by_layer(engines)
    layers = forwards.contributions({**groups, EVERYTHING: engines})
    together = layers.pop()
    logprob = _logprob_contribution(forwards, introducers)
    whole = forwards.logp_b - forwards.logp_a
    explained = np.array(together.first) + (np.array(logprob[0].first) if logprob else 0.0)
    opened = [c.name for c in _largest(layers) if len(c.units) > 1]
    inside = [u for name in opened for u in groups[name]]
    by_unit = {c.name: c for c in forwards.contributions({u.name: [u] for u in inside})}
    return Attribution(
        edge=edge.name,
        tokens=[forwards.index.locate(int(n)) for n in forwards.number],
        whole=whole.tolist(),
        layers=[*layers, *logprob],
        operators={name: [by_unit[u.name] for u in groups[name]] for name in opened},
        left_out=[u.name for u in units if u.label == "undetermined"],
        unexplained=float(np.abs(whole - explained).max()) if len(whole) else float("nan"),
    )


def _by_layer(units: Sequence[Unit]) -> dict[str, list[Unit]]:
    """Groups units by layer; a unit outside of the layers is a group of its own."""
    groups: dict[str, list[Unit]] = {}
    for unit in units:
        groups.setdefault(unit.name if unit.layer is None else f"layers.{unit.layer}", []).append(
            unit
        )
    return groups


def _largest(layers: Sequence[Contribution]) -> list[Contribution]:
    """Returns the layers with most of the contributions."""
    total = sum(c.mean_abs for c in layers)
    chosen: list[Contribution] = []
    for c in sorted(layers, key=lambda c: -c.mean_abs):
        if sum(f.mean_abs for f in chosen) >= OPENED * total:
            break
        chosen.append(c)
    return chosen


def _logprob_contribution(forwards: "_Forwards", introducers: Sequence[Unit]) -> list[Contribution]:
    """The log-prob is the last unit, so the difference that it introduces is its contribution."""
    if not any(u.sites == ["logprob"] for u in introducers):
        return []
    b_on_a = forwards.logprob(forwards.edge.second.cross_grafted)
    part = (b_on_a - forwards.logp_a).tolist()
    return [Contribution(name="logprob", units=["logprob"], first=part, last=part)]


class _Forwards:
    """Forwards of both engines with some introduced differences added or removed."""

    def __init__(self, run: Run, edge: GraftedEdge, plan: TracePlan, progress: Progress) -> None:
        self.run, self.edge, self.plan, self.progress = run, edge, plan, progress
        self.index = RowIndex(self.edge.tokens)
        both = (self.edge.first.captured, self.edge.second.captured, self.edge.second.cross_grafted)
        valued = [RecordedRows(p, self.index).has_value("logprob") for p in both]
        self.number = np.flatnonzero(np.logical_and.reduce([*valued, self.index.counted]))
        self.logp_a, self.logp_b = (self.logprob(p) for p in both[:2])

    def logprob(self, reader: PassReader) -> np.ndarray:
        """Returns the log-prob of every token of the edge, float64."""
        values = RecordedRows(reader, self.index).values("logprob", self.number)
        return values[:, 0].double().numpy()

    def contributions(self, groups: Groups) -> list[Contribution]:
        """Measures the contribution of each group alone."""
        self._announce(len(groups))
        recorded = (self.edge.first.captured, self.edge.second.cross_grafted)
        a_on_a, b_on_a = map(source_of, recorded)
        first = {("first", n): self._shift(u, a_on_a, b_on_a) for n, u in groups.items()}
        last = {("last", n): self._shift(u, b_on_a, a_on_a) for n, u in groups.items()}
        passes = self._run([(self.edge.second, first), (self.edge.first, last)])
        return [
            Contribution(
                name=name,
                units=[u.name for u in units],
                first=(self.logp_b - self.logprob(passes["first", name])).tolist(),
                last=(self.logprob(passes["last", name]) - self.logp_a).tolist(),
            )
            for name, units in groups.items()
        ]

    def _shift(
        self, units: Sequence[Unit], source: RecordedPass, base: RecordedPass
    ) -> Intervention:
        return Intervention(
            kind="shift",
            sites=tuple(s for u in units for s in u.sites),
            source=source,
            base=base,
            late=late_sites(model_sites(self.edge.shape), self.edge.fused),
            observed=False,
        )

    def _run(
        self, asked: list[tuple[GraftedEnd, dict[tuple[str, str], Intervention]]]
    ) -> dict[tuple[str, str], PassReader]:
        """Starts each engine once, even if it is at both ends."""
        sides: dict[SideName, dict[str, tuple[str, Intervention]]] = {}
        for end, interventions in asked:
            wanted = {"/".join(key): (end.passname, i) for key, i in interventions.items()}
            sides.setdefault(end.side, {}).update(wanted)
        passes: dict[str, PassReader] = {}
        for side, named in sides.items():
            trace = traces_of(self.run)[side]
            passes |= intervene(trace, side, self.run, named, self.plan, self.progress)
        return {key: passes["/".join(key)] for _, each in asked for key in each}

    def _announce(self, forwards: int) -> None:
        ends = (self.edge.first, self.edge.second)
        seconds = forwards * sum(end.self_grafted.record.seconds for end in ends)
        message = f"attribution: {forwards} forwards of each engine, about {seconds:.0f} s"
        self.progress(f"{message} and the time to load them", 0, 0)
