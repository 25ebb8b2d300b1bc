"""Graft passes -> units: which unit introduced a difference, and which ones inherited it.

Arrays with an entry for each row are indexed by the row number of the batch.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from rlk_align.model.sites import RowIndex, Site, model_sites
from rlk_align.probe.determined_rows import RecordedEnd, determined_rows
from rlk_align.probe.exact_difference import exact_difference, split_difference
from rlk_align.probe.graft import GraftedEdge
from rlk_align.probe.graph import UnitGraph, unit_graphs
from rlk_align.probe.unit_record import Difference, Label, Order, Split, Unit
from rlk_align.progress import Progress
from rlk_align.trace.numbered import blocks

BLOCK_ELEMENTS = 1 << 20
"""Values of one site that are compared at a time."""


@dataclass(slots=True)
class _Sums:
    """The sums of one difference, collected block by block."""

    squares: float = 0.0
    largest: float = 0.0
    elements: int = 0

    def add(self, d: torch.Tensor) -> None:
        self.squares += float(d.square().sum())
        # NaN stays NaN.
        self.largest = float(torch.maximum(d.abs().amax(), torch.tensor(self.largest).double()))
        self.elements += d.numel()

    def over(self, squares: float) -> Difference:
        """Returns the difference, relative to a vector with this sum of squares."""
        return Difference(
            rms=(self.squares / max(1, self.elements)) ** 0.5,
            rel_l2=(self.squares / squares) ** 0.5 if squares else float(self.squares > 0),
            max_abs=self.largest,
        )


@dataclass(slots=True)
class _Walk:
    """An edge and its recorded passes, while its units are decomposed one by one."""

    edge: GraftedEdge
    index: RowIndex
    sites: dict[str, Site]
    first: RecordedEnd
    second: RecordedEnd
    distances: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    """Site -> for each row, the squares of A(xA) - B(xB) and of B(xB); NaN if not recorded."""


def decompose(edge: GraftedEdge, progress: Progress) -> list[Unit]:
    """Returns the units of an edge in execution order; an undetermined unit has a reason."""
    index = RowIndex(edge.tokens)
    sites = {s.name: s for s in model_sites(edge.shape)}
    walk = _Walk(
        edge, index, sites, RecordedEnd(edge.first, index), RecordedEnd(edge.second, index)
    )
    hidden = {
        s: f"{end.name} cannot show it: {reason}"
        for end in (walk.first, walk.second)
        for s, reason in end.end.captured.record.unexposed.items()
    }
    graphs = unit_graphs(sites.values(), edge.fused, hidden)
    units = {}
    progress("decomposing", 0, len(graphs))
    for done, graph in enumerate(graphs, 1):
        units[graph.sites[0].name] = _unit(walk, graph)
        progress("decomposing", done, len(graphs))
    for name, reason in hidden.items():
        units[name] = _hidden(edge, sites[name], reason)
    return [units[name] for name in sites if name in units]


def _hidden(edge: GraftedEdge, site: Site, reason: str) -> Unit:
    return Unit(
        edge=edge.name,
        name=site.name,
        sites=[site.name],
        region=False,
        layer=site.layer,
        op_class=site.op_class,
        inputs=list(site.inputs + site.prefix_inputs),
        label="undetermined",
        reason=reason,
        orders=[],
        interaction=[],
    )


def _unit(walk: _Walk, graph: UnitGraph) -> Unit:
    for site in graph.sites:
        walk.distances[site.name] = _distances(walk, site.name)
    forward, forward_rows = _order(walk, graph, walk.second, walk.first)
    backward, backward_rows = _order(walk, graph, walk.first, walk.second)
    label, reason = _label(forward, backward)
    return Unit(
        edge=walk.edge.name,
        name=graph.name,
        sites=[s.name for s in graph.sites],
        region=graph.is_region,
        layer=graph.sites[-1].layer,
        op_class=graph.sites[-1].op_class,
        inputs=list(dict.fromkeys(graph.inputs + graph.prefix_inputs)),
        label=label,
        reason=reason,
        orders=[forward, backward],
        interaction=_interaction(walk, graph, forward_rows & backward_rows),
    )


def _label(forward: Order, backward: Order) -> tuple[Label, str]:
    determined = [o for o in (forward, backward) if o.rows]
    if not determined:
        return "undetermined", "; ".join(dict.fromkeys([forward.reason, backward.reason]))
    if any(o.introduced_rows for o in determined):
        return "introducer", ""
    if any(o.gain is not None and o.gain > 1 for o in determined):
        return "amplifier", ""
    return "clean", ""


def _order(
    walk: _Walk, graph: UnitGraph, grafted: RecordedEnd, source: RecordedEnd
) -> tuple[Order, np.ndarray]:
    """Returns the order in which `grafted` reads the inputs of `source`, and its row mask."""
    expected = walk.index.expected(graph.sites[0], "decode" in walk.edge.name)
    rows, reason = determined_rows(walk.index, graph, grafted, source, expected)
    numbers = np.flatnonzero(rows)
    introduced = np.zeros(len(walk.index), dtype=bool)
    size = np.zeros(len(walk.index))
    splits = []
    if len(numbers):
        splits = [_split(walk, s, grafted, source, numbers, introduced, size) for s in graph.sites]
    introducing = np.flatnonzero(introduced)
    order = Order(
        grafted=grafted.end.side,
        passname=grafted.end.passname,
        rows=len(numbers),
        left_out=int(expected.sum()) - len(numbers),
        reason=reason,
        introduced_rows=len(introducing),
        first=walk.index.locate(int(introducing[0])) if len(introducing) else None,
        largest=walk.index.locate(int(np.argmax(size))) if len(introducing) else None,
        splits=splits,
        inputs_rel_l2=_inputs_distance(walk, graph, grafted, numbers),
    )
    return order, rows


def _split(
    walk: _Walk,
    site: Site,
    grafted: RecordedEnd,
    source: RecordedEnd,
    numbers: np.ndarray,
    introduced_in: np.ndarray,
    size: np.ndarray,
) -> Split:
    """Splits one output. Also marks the rows in which a difference was introduced, and updates its
    largest relative size in each row."""
    introduced_sums, inherited_sums, rounding, norm = _Sums(), _Sums(), 0.0, 0.0
    for some in blocks(numbers, site.features, BLOCK_ELEMENTS):
        from_source = source.captured.values(site.name, some)
        on_source = grafted.cross_grafted.values(site.name, some)
        captured = grafted.captured.values(site.name, some)
        introduced, inherited, errors = split_difference(from_source, on_source, captured)
        introduced_sums.add(introduced)
        inherited_sums.add(inherited)
        rounding = max(rounding, float(errors.abs().amax()))
        squares = captured.double().square().sum(1)
        norm += float(squares.sum())
        # NaN counts as introduced.
        introduced_in[some] |= (~(introduced == 0)).any(1).numpy()
        relative = (
            introduced.square().sum(1) / squares.clamp_min(torch.finfo(squares.dtype).tiny)
        ).sqrt()
        size[some] = np.maximum(size[some], relative.nan_to_num(torch.inf).numpy())
    return Split(
        site=site.name,
        introduced=introduced_sums.over(norm),
        inherited=inherited_sums.over(norm),
        rounding=rounding,
    )


def _interaction(walk: _Walk, graph: UnitGraph, rows: np.ndarray) -> list[Difference]:
    numbers = np.flatnonzero(rows)
    differences = []
    for site in graph.sites if len(numbers) else ():
        sums, norm = _Sums(), 0.0
        for some in blocks(numbers, site.features, BLOCK_ELEMENTS):
            forward, _ = exact_difference(
                walk.first.captured.values(site.name, some),
                walk.second.cross_grafted.values(site.name, some),
            )
            on_second = walk.second.captured.values(site.name, some)
            backward, _ = exact_difference(
                walk.first.cross_grafted.values(site.name, some), on_second
            )
            sums.add(forward - backward)
            norm += float(on_second.double().square().sum())
        differences.append(sums.over(norm))
    return differences


def _distances(walk: _Walk, site: str) -> tuple[np.ndarray, np.ndarray]:
    """For each row, the squares of A(xA) - B(xB) and of B(xB); NaN if not recorded."""
    far, norm = np.full((2, len(walk.index)), np.nan)
    numbers = np.flatnonzero(
        walk.first.captured.has_value(site) & walk.second.captured.has_value(site)
    )
    for some in blocks(numbers, walk.sites[site].features, BLOCK_ELEMENTS):
        a, b = walk.first.captured.values(site, some), walk.second.captured.values(site, some)
        far[some] = exact_difference(a, b)[0].square().sum(1).numpy()
        norm[some] = b.double().square().sum(1).numpy()
    return far, norm


def _inputs_distance(
    walk: _Walk, graph: UnitGraph, grafted: RecordedEnd, numbers: np.ndarray
) -> float | None:
    names = dict.fromkeys(graph.inputs + graph.prefix_inputs)
    if not len(numbers) or not names:
        return None
    far = sum(float(walk.distances[n][0][numbers].sum()) for n in names)
    norm = sum(float(walk.distances[n][1][numbers].sum()) for n in names)
    return (far / norm) ** 0.5 if norm else float(far > 0)
