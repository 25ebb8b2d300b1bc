"""Compares pairs bit for bit and by metric: where do two passes diverge, and which unit introduces
it?

A unit whose inputs are equal and whose outputs differ introduces the difference; the proof needs no
threshold. A unit whose inputs differ already may only pass the difference on. Equality is read from
digests; values are read only where digests differ.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from rlk_align.compare.distribution import compare_distributions
from rlk_align.compare.edge_rows import UNKNOWN, EdgeRows
from rlk_align.compare.expert_choice import Routers
from rlk_align.compare.metrics import ValueMetrics, edge_metrics, error_frontier
from rlk_align.compare.pairing import PairedSite, Unpaired, pair_site
from rlk_align.compare.ranks import Holders, Shards, use_copies
from rlk_align.compare.routing import Flips, Routing
from rlk_align.model.sites import RowIndex, Site
from rlk_align.progress import Progress
from rlk_align.results import (
    Distribution,
    EdgeMetrics,
    EdgeName,
    EdgeResult,
    Introducer,
    SideName,
    SiteResult,
)
from rlk_align.trace.numbered import NumberedRows, blocks, read_ahead, rows_that_differ
from rlk_align.trace.reader import PassReader
from rlk_align.trace.schema import COMPILED

BLOCK_ELEMENTS = 1 << 18
"""Values compared at a time: small enough for a CPU's cache."""


@dataclass(frozen=True, slots=True)
class Side:
    """One end of an edge: a pass, and the same pass run again."""

    name: str
    """The name in reasons, e.g. `rollout decode`."""
    of: SideName
    observed: PassReader
    repeat: PassReader | None
    shards: Mapping[str, Shards] = field(default_factory=dict)
    """Site -> the part that each rank holds; without sites that every rank holds whole."""
    stages: Mapping[str, list[int]] = field(default_factory=dict)
    """Site -> the ranks of the stage that computes it; empty where all ranks compute it."""
    experts: Sequence[list[int]] = ()
    """For each expert the ranks that have it; empty where all ranks have all experts."""
    lost: Sequence[int] = ()
    """The ranks of a recorded job that did not complete their shards."""
    temperature: float = 1.0
    """The engine divides logits by it."""

    def name_at(self, site: str) -> str:
        """The name in reasons why rows of a site are missing."""
        stage = self.stages.get(site)
        lost = [rank for rank in self.lost if not stage or rank in stage]
        if not lost:
            return self.name
        ranks = f"rank{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))}"
        return f"{self.name}, without the shard of {ranks},"


@dataclass(frozen=True, slots=True)
class Edge:
    """Two passes of one batch, to be compared row by row."""

    name: EdgeName
    first: Side
    second: Side
    decode: bool
    """Whether either end is a decode pass, which the last sampled token never enters."""
    same_token: np.ndarray
    """Rows at which both ends were given the same token id, a mask over the batch."""
    routers: Routers | None = None
    """The model's routers; without them the gaps of flips are not measured."""


@dataclass(slots=True)
class _EdgeState:
    """The results of the sites compared so far; masks are over the batch's rows."""

    rows: EdgeRows
    equal: dict[str, np.ndarray] = field(default_factory=dict)
    sites: list[SiteResult] = field(default_factory=list)
    unpaired: list[Unpaired] = field(default_factory=list)
    expected: int = 0
    paired: int = 0
    cached: int = 0
    metrics: EdgeMetrics | None = None
    distribution: Distribution | None = None
    routing: Routing = field(default_factory=Routing)
    logprobs: tuple[np.ndarray, np.ndarray, np.ndarray] = field(
        default_factory=lambda: (np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0))
    )
    """Rows of the batch, and both sides' log-probs at them."""


class _SiteRows:
    """The rows of the current site in all passes, which edges share."""

    def __init__(self, edges: list[Edge], sites: list[Site], index: RowIndex) -> None:
        sides = [side for edge in edges for side in (edge.first, edge.second)]
        self._sides = {side.name: side for side in sides}
        passes = [p for side in sides for p in (side.observed, side.repeat) if p is not None]
        by_folder = {p.folder: p for p in passes}
        self._folders = list(by_folder)
        self._ahead = read_ahead(list(by_folder.values()), sites, index)
        self._rows: dict[Path, NumberedRows | None] = {}
        self._noisy: dict[str, np.ndarray] = {}
        self._count = len(index)

    def turn_to_next(self) -> None:
        self._rows = dict(zip(self._folders, next(self._ahead), strict=True))
        self._noisy = {name: self._not_repeated(side) for name, side in self._sides.items()}

    def get(self, reader: PassReader) -> NumberedRows | None:
        return self._rows[reader.folder]

    def cached(self, reader: PassReader) -> np.ndarray:
        """Rows that the pass took from its cache, as a mask over the batch."""
        mask, numbered = np.zeros(self._count, dtype=bool), self.get(reader)
        if numbered is not None:
            mask[numbered.cached] = True
        return mask

    def noisy(self, side: Side) -> np.ndarray:
        """Rows that the side's repeated pass does not reproduce, as a mask over the batch."""
        return self._noisy[side.name]

    def _not_repeated(self, side: Side) -> np.ndarray:
        mask = np.zeros(self._count, dtype=bool)
        if side.repeat is not None:
            observed, repeat = self.get(side.observed), self.get(side.repeat)
            if observed is not None and repeat is not None:
                mask[rows_that_differ(observed, repeat)] = True
        return mask


def compare_edges(
    edges: list[Edge], sites: list[Site], index: RowIndex, progress: Progress
) -> tuple[list[EdgeResult], list[EdgeRows]]:
    """Compares all edges site by site in execution order. Returns the results of the edges and
    their rows."""
    states = {e.name: _EdgeState(EdgeRows.of(e.name, index, len(sites))) for e in edges}
    graph = {s.name: s for s in sites}
    rows = _SiteRows(edges, sites, index)
    for done, site in enumerate(sites, 1):
        rows.turn_to_next()
        for edge in edges:
            _compare_site(edge, site, index, rows, states[edge.name], graph)
        progress("comparing", done, len(sites))
    results = [_edge_result(e, states[e.name], index) for e in edges]
    return results, [states[e.name].rows for e in edges]


def _compare_site(
    edge: Edge,
    site: Site,
    index: RowIndex,
    rows: _SiteRows,
    state: _EdgeState,
    graph: dict[str, Site],
) -> None:
    expected = index.expected(site, edge.decode)
    a, b = edge.first.observed, edge.second.observed
    cached = expected & (rows.cached(a) | rows.cached(b))
    expected &= ~cached

    def paired_in(wanted: np.ndarray) -> tuple[PairedSite | None, list[Unpaired]]:
        return pair_site(
            site,
            rows.get(a),
            rows.get(b),
            wanted,
            (edge.first.name_at(site.name), edge.second.name_at(site.name)),
            (a.record.unexposed.get(site.name), b.record.unexposed.get(site.name)),
        )

    paired, unpaired = paired_in(expected)
    # Rows of single experts that an engine never has are represented by the sum of the experts, and
    # what a recurrence reads from products by the recurrence.
    steps = ("decay", "sigmoid", "time_step", "step_decay")
    within = bool(site.experts) or site.operator.formula in steps
    # A compiled job shows what lies at its boundary, and `unpaired` names the rest.
    hidden = any(p.record.unexposed.get(site.name) == COMPILED for p in (a, b))
    inside = (within or hidden) and bool(unpaired) and all(u.explained for u in unpaired)
    state.expected += 0 if inside else int(expected.sum())
    state.cached += 0 if inside else int(cached.sum())
    state.unpaired += unpaired
    if paired is None:
        return
    state.paired += len(paired.number)
    flips = state.routing.flips.get(site.experts)
    paired, not_comparable = _comparable(paired, flips)
    same = _equal_rows(a, b, paired, flips)
    equal = np.zeros(len(index), dtype=bool)
    equal[paired.number] = same
    if cached.any():
        # Later rows read them.
        from_cache, _ = paired_in(cached)
        assert from_cache is not None
        equal[from_cache.number] = _equal_rows(a, b, from_cache, None)
    inputs_equal = _inputs_equal(site, index, edge, state.equal, graph)
    state.equal[site.name] = equal
    noisy = rows.noisy(edge.first) | rows.noisy(edge.second)
    differ = ~same
    if site.operator.formula == "router":
        state.routing.see_router(paired)
    if site.operator.formula == "top_k":
        (router,) = (graph[name] for name in site.inputs)
        read = _inputs_equal(router, index, edge, state.equal, graph)
        state.routing.see_choice(a, b, paired, read, index, edge.routers)
    introduced = differ & inputs_equal[paired.number] & ~noisy[paired.number]
    values = _compare_values(a, b, site, paired, differ, introduced, flips)
    ids = site.operator.formula == "top_k"
    errors = differ.astype(np.float32) if ids else _row_errors(paired, differ, values)
    state.rows.add(site.name, paired.number, errors)
    introduced_valued = introduced & paired.valued
    without_values = np.flatnonzero(introduced & ~paired.valued)
    # A difference of expert ids has no size.
    least = _least_errors(paired, without_values[:0] if ids else without_values)
    frontier = error_frontier(np.concatenate([values.frontier, least]))
    nonfinite = paired.nonfinite

    def first(mask: np.ndarray) -> tuple[int, int] | None:
        return index.locate(int(paired.number[np.argmax(mask)])) if mask.any() else None

    state.sites.append(
        SiteResult(
            site=site.name,
            layer=site.layer,
            op=site.op,
            op_class=site.op_class,
            rows=len(paired.number),
            differ=int(differ.sum()),
            introduced=int(introduced.sum()),
            introduced_valued=int(introduced_valued.sum()),
            noisy=int(noisy[paired.number].sum()),
            nonfinite=int(nonfinite.sum()),
            first_introduced=first(introduced),
            first_nonfinite=first(nonfinite > 0),
            valued_rows=values.rows,
            elements_differ=values.elements,
            max_abs=values.max_abs,
            max_ulp=values.max_ulp,
            max_rel_l2=values.max_rel_l2,
            mean_rel_l2=values.sum_rel_l2 / values.rows if values.rows else 0.0,
            min_cosine=values.min_cosine,
            frontier=[(float(m), float(e)) for m, e in frontier],
            not_comparable=not_comparable,
            ranks=_ranks(edge, site, paired, introduced, values.features, index),
        )
    )
    if site.op == "logits":
        temperatures = edge.first.temperature, edge.second.temperature
        wanted = expected & index.counted & ~state.routing.flipped(len(index))
        state.distribution = compare_distributions(a, b, paired, same, wanted, temperatures, index)
    if site.op == "logprob":
        counts = index.counted[paired.number]
        logp_a = a.values("logprob", paired.a, paired.a_at[counts])[:, 0].numpy()
        logp_b = b.values("logprob", paired.b, paired.b_at[counts])[:, 0].numpy()
        state.metrics = edge_metrics(logp_a, logp_b, index.sample[paired.number[counts]])
        state.rows.add_logprobs(paired.number[counts], logp_a, logp_b)
        state.logprobs = (paired.number[counts], logp_a, logp_b)


def _comparable(paired: PairedSite, flips: Flips | None) -> tuple[PairedSite, int]:
    """Returns the pair without rows of experts that the sides do not share or are not known to
    share, and the number of these rows."""
    if flips is None:
        return paired, 0
    keep = flips.comparable(paired.number)
    flipped = flips.flipped[paired.number]
    keep &= ~flipped | paired.valued
    shared = replace(
        paired, number=paired.number[keep], a_at=paired.a_at[keep], b_at=paired.b_at[keep]
    )
    return shared, int((~keep).sum())


def _equal_rows(
    a: PassReader, b: PassReader, paired: PairedSite, flips: Flips | None
) -> np.ndarray:
    """Whether both rows are equal, bool `[N]`: by their bits or, where the engines compute in
    different dtypes or compute different experts, by the values that both sides keep."""
    name = paired.site.name
    records = a.record.sites[name], b.record.sites[name]
    if records[0].features != records[1].features:
        return paired.equal
    # Copies of ranks have the dtype of their side.
    if records[0].dtype != records[1].dtype:
        equal = np.zeros(len(paired.number), dtype=bool)
        by_value = np.ones(len(equal), dtype=bool)
    else:
        equal = paired.equal
        by_value = (
            np.zeros(len(equal), dtype=bool) if flips is None else flips.flipped[paired.number]
        )
    rows = np.flatnonzero(by_value & paired.valued)
    for part in blocks(rows, records[0].features, BLOCK_ELEMENTS):
        x = a.values(name, paired.a, paired.a_at[part]).double()
        y = b.values(name, paired.b, paired.b_at[part]).double()
        if flips is not None:
            x, y = flips.aligned(paired.number[part], x, y)
        equal[part] = (x == y).all(dim=1).numpy()
    return equal & ~paired.disagree


def _least_errors(paired: PairedSite, rows: np.ndarray) -> np.ndarray:
    """Returns (magnitude, error) points `[M, 2]` of rows whose values were not kept: a row whose
    largest magnitude is M on one side and m < M on the other has an entry of M that is at least
    M - m off."""
    a, b = paired.a.absmax[paired.a_at[rows]], paired.b.absmax[paired.b_at[rows]]
    return np.stack([np.maximum(a, b), np.abs(a - b)], axis=1)


def _inputs_equal(
    site: Site,
    index: RowIndex,
    edge: Edge,
    equal: dict[str, np.ndarray],
    graph: dict[str, Site],
) -> np.ndarray:
    """Returns the rows at which all inputs of the unit are equal, as a mask over the batch.

    An input that was not paired is replaced by its own inputs: the unit then represents the region
    that starts there.
    """

    def rows(name: str) -> np.ndarray:
        if name in equal:
            return equal[name]
        return _inputs_equal(graph[name], index, edge, equal, graph)

    good = np.ones(len(index), dtype=bool)
    if site.operator.formula == "embedding":
        good &= edge.same_token
    if site.operator.formula == "log_softmax":
        # Row p has the log-prob of token p + 1.
        good &= np.roll(edge.same_token, -1)
    for name in site.inputs:
        good &= rows(name)
    for name in site.prefix_inputs:
        good &= index.prefix_all(rows(name))
    return good


def _compare_values(
    a: PassReader,
    b: PassReader,
    of: Site,
    paired: PairedSite,
    differ: np.ndarray,
    introduced: np.ndarray,
    flips: Flips | None,
) -> ValueMetrics:
    """Returns the metrics of the differing rows whose values both sides keep, block by block;
    expert ids have none."""
    site, metrics = of.name, ValueMetrics()
    rows = np.flatnonzero(differ & paired.valued)
    if not len(rows) or of.operator.formula == "top_k":
        return metrics
    features = a.record.sites[site].features
    if b.record.sites[site].features != features:
        metrics.max_abs = metrics.max_rel_l2 = metrics.sum_rel_l2 = float("nan")
        return metrics
    step = max(1, BLOCK_ELEMENTS // features)
    for part in blocks(rows, features, 1 << 24):
        value_a = a.values(site, paired.a, paired.a_at[part])
        value_b = b.values(site, paired.b, paired.b_at[part])
        norm_a = torch.from_numpy(paired.a.norm[paired.a_at[part]])
        norm_b = torch.from_numpy(paired.b.norm[paired.b_at[part]])
        mask = torch.from_numpy(introduced[part])
        for which, reader in enumerate((a, b)):
            use_copies((value_a, value_b)[which], paired, which, part, reader)
        if flips is not None:
            value_a, value_b = flips.aligned(paired.number[part], value_a, value_b)
            norm_a, norm_b = (
                torch.linalg.vector_norm(v.double(), dim=1) for v in (value_a, value_b)
            )
        for i in range(0, len(part), step):
            at = slice(i, i + step)
            metrics.add(value_a[at], value_b[at], norm_a[at], norm_b[at], mask[at])
    return metrics


def _row_errors(paired: PairedSite, differ: np.ndarray, values: ValueMetrics) -> np.ndarray:
    """Returns the relative L2 of each pair, `[N]`: 0 where equal, `UNKNOWN` where values were not
    kept."""
    errors = np.where(differ, UNKNOWN, np.float32(0))
    if values.rel_l2:
        errors[differ & paired.valued] = np.concatenate(values.rel_l2)
    return errors


def _ranks(
    edge: Edge, site: Site, paired: PairedSite, introduced: np.ndarray, features: np.ndarray,
    index: RowIndex,
) -> dict[SideName, list[int]]:  # fmt: skip
    """Returns for each side the ranks that hold the differing values of the introduced rows;
    without sides of one rank and sides whose ranks are not known."""
    by_side: dict[SideName, set[int]] = {}
    if introduced.any():
        for which, side in enumerate((edge.first, edge.second)):
            holders = Holders(side.observed, side.shards, side.stages, side.experts)
            ranks = holders.ranks(site, paired, which, introduced, features, index)
            if ranks:
                by_side.setdefault(side.of, set()).update(ranks)
    return {side: sorted(ranks) for side, ranks in by_side.items()}


def _edge_result(edge: Edge, state: _EdgeState, index: RowIndex) -> EdgeResult:
    empty = np.zeros(0)
    return EdgeResult(
        name=edge.name,
        metrics=state.metrics or edge_metrics(empty, empty),
        sites=state.sites,
        first_bitwise=_first_introducer(state.sites),
        expected_rows=state.expected,
        paired_rows=state.paired,
        cached_rows=state.cached,
        unpaired=[(u.site, u.reason, u.explained) for u in state.unpaired],
        routing=state.routing.result(state.logprobs, index),
        distribution=state.distribution,
    )


def _first_introducer(sites: list[SiteResult]) -> Introducer | None:
    for at, site in enumerate(sites):
        if site.first_introduced is not None:
            return Introducer.among(sites[:at], site, site.first_introduced)
    return None
