"""Two traces -> every operator of each pass, compared with float64.

An operator is recomputed from the inputs that the same pass recorded. Inherited differences
therefore do not count, and no engine is needed. The result says which side is off, and by how many
roundings.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlk_align.compare.controls import paired_logprobs
from rlk_align.engines.common.kernels import parse_excluded
from rlk_align.engines.registry import engine_info
from rlk_align.errors import ModelError, UnknownEngine
from rlk_align.model.edges import EDGE_ENDS
from rlk_align.model.operators import OPERATORS
from rlk_align.model.shape import ModelShape
from rlk_align.model.sites import RowIndex, Site, model_sites
from rlk_align.probe.explain_logprobs import explain_pass
from rlk_align.probe.graph import partners
from rlk_align.probe.referee.experts import as_recorded
from rlk_align.probe.referee.exponentials import sum_orders
from rlk_align.probe.referee.recorded import RecordedPass
from rlk_align.probe.referee.reference import Reference, RowTokens
from rlk_align.probe.referee.rounding import ErrorSums
from rlk_align.probe.referee.row_choice import choose_rows
from rlk_align.probe.referee.weights import NotRefereed, OtherWeight
from rlk_align.progress import Progress
from rlk_align.results import (
    Comparison,
    EdgeName,
    LiveSetting,
    RefereedUnit,
    RoundingErrors,
    SideName,
)
from rlk_align.trace.reader import Trace
from rlk_align.trace.schema import CUTS, SHIFT_IS_HARMLESS
from rlk_align.trace.values import RecordedRows

SUSPECT = 100.0
"""A log-prob that is off by more roundings than this does not follow from its logits as stated."""
EXPLAINED = 10.0
"""By this factor the errors of a rotation must shrink if a shift of its positions explains them."""
CPU_ELEMENTS, GPU_ELEMENTS = 1 << 18, 1 << 24
"""Entries that are compared at once."""
PRODUCT_ELEMENTS = 1 << 23
"""Entries of a matrix product that are recomputed at once."""
GPU_BYTES = 1 << 33
"""A GPU is used only if this much memory is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass of a side, and the side's checkpoint, or the reason why it cannot be read."""

    side: SideName
    name: str
    edges: list[EdgeName]
    """The edges of which the pass is an end."""
    trace: Trace
    fused: Mapping[str, str]
    """Site -> the site that the engine fuses with it."""
    recorded: RecordedPass
    reference: Reference | str


def referee(
    comparison: Comparison, rollout: Trace, train: Trace, progress: Progress
) -> list[RefereedUnit]:
    """Returns every operator of the compared passes, in execution order. An operator that cannot be
    recomputed has a reason. Raises CorruptTrace if a trace is damaged."""
    if comparison.stopped or not comparison.edges:
        return []
    sides: dict[SideName, Trace] = {"rollout": rollout, "train": train}
    index = RowIndex(rollout.tokens)
    device = _device()
    first = _reference(rollout, device)
    references = {"rollout": first, "train": _reference(train, device, first)}
    sites = model_sites(rollout.record.shape)
    edges: dict[tuple[SideName, str], list[EdgeName]] = {}
    for edge in comparison.edges:
        for end in EDGE_ENDS[edge.name]:
            edges.setdefault(end, []).append(edge.name)
    recorded = {end: RecordedRows(sides[end[0]].read_pass(end[1]), index) for end in edges}
    valued = np.logical_or.reduce([_valued(rows, sites) for rows in recorded.values()])
    chosen = choose_rows(comparison, _worst_rows(comparison, sides, index), valued, index)
    passes = [
        Pass(
            side=side,
            name=name,
            edges=of,
            trace=sides[side],
            fused=_fused(sides[side]),
            recorded=RecordedPass(recorded[side, name], index, chosen, device),
            reference=references[side],
        )
        for (side, name), of in edges.items()
    ]
    walk = Walk(index, device, {site.name: site for site in sites})
    units: list[RefereedUnit] = []
    for done, site in enumerate(sites, 1):
        units += walk.units(site, passes)
        progress("recomputing in float64", done, len(sites))
    if device.type == "cuda":
        # Engines may start after this.
        torch.cuda.empty_cache()
    return units


def _valued(rows: RecordedRows, sites: Sequence[Site]) -> np.ndarray:
    """The mask of the rows of the batch with recorded values, by the first site that has any. Sites
    that later rows read and log-probs come last: more of their rows are recorded than of others."""
    more = {name for s in sites for name in s.prefix_inputs} | {"logprob"}
    few = sorted(sites, key=lambda s: s.name in more)
    masks = (rows.has_value(s.name) for s in few)
    return next((mask for mask in masks if mask.any()), np.zeros(len(rows.index), dtype=bool))


def _device() -> torch.device:
    """A GPU if one has enough free memory, and else the CPU."""
    if torch.cuda.is_available():
        try:
            free, _ = torch.cuda.mem_get_info()
        except RuntimeError:
            # The GPU is full, or another process uses it exclusively.
            free = 0
        if free >= GPU_BYTES:
            return torch.device("cuda")
    return torch.device("cpu")


def _reference(
    trace: Trace, device: torch.device, other: Reference | str | None = None
) -> Reference | str:
    """`other`: the reference of the other side."""
    r, tp = trace.record, int(trace.record.options.get("tp") or 1)
    like = None if isinstance(other, str) else other
    orders = sum_orders(r.environment)
    try:
        return Reference(
            Path(r.model), r.shape, r.dtype, tp, r.attributes, trace.weights, device, like, orders,
            _added(r.options) if tp > 1 else frozenset(), CUTS in r.environment, r.adapters,
            r.products, r.cache, bool(r.imported),
        )  # fmt: skip
    except ModelError as error:
        return f"the checkpoint cannot be read: {error.message}"


def _added(options: Mapping[str, Any]) -> frozenset[str]:
    """The operators whose outputs tensor-parallel ranks round and add up; with the kernels only
    excluded operators."""
    summed = frozenset(name for name, o in OPERATORS.items() if o.sharding.join == "sum")
    if options.get("kernels") != "rlk":
        return summed
    excluded = options.get("except")
    return summed & parse_excluded(str(excluded)) if excluded else frozenset()


def _fused(trace: Trace) -> dict[str, str]:
    """Each site of a fused pair -> the other site."""
    try:
        pairs = engine_info(trace.record.engine).fused
    except UnknownEngine:
        # The capture comes from another installation, with an engine that is unknown here.
        return {}
    partner = partners({s.name: s for s in model_sites(trace.record.shape)}, pairs)
    return partner | {second: first for first, second in partner.items()}


def _explanation(site: Site, p: Pass, errors: RoundingErrors | None) -> str:
    """How log-probs were computed that do not follow from their logits as stated."""
    if site.op != "logprob" or errors is None or errors.rms <= SUSPECT:
        return ""
    return explain_pass(p.trace, p.name).words


def _settings(site: Site, p: Pass) -> list[LiveSetting]:
    return [] if isinstance(p.reference, str) else p.reference.settings(site)


def _worst_rows(
    comparison: Comparison, sides: Mapping[SideName, Trace], index: RowIndex
) -> list[int]:
    """Returns the row of each edge at which the |Δ| of the log-prob is largest."""
    worst: dict[int, None] = {}
    for edge in comparison.edges:
        first, second = (sides[side].read_pass(name) for side, name in EDGE_ENDS[edge.name])
        number, a, b = paired_logprobs(first, second, index)
        if len(number):
            delta = np.abs(a.astype(np.float64) - b.astype(np.float64))
            worst[int(number[np.nan_to_num(delta, nan=np.inf).argmax()])] = None
    return list(worst)


class Walk:
    """Recomputes one operator after another. N = rows of a block."""

    def __init__(self, index: RowIndex, device: torch.device, sites: Mapping[str, Site]) -> None:
        self._sites = sites
        self._index, self._device = index, device
        # The target of a sequence's last row is never used.
        self._target = np.roll(index.token, -1)
        self._block = CPU_ELEMENTS if device.type == "cpu" else GPU_ELEMENTS

    def units(self, site: Site, passes: Sequence[Pass]) -> list[RefereedUnit]:
        """Returns one operator of every pass. If two passes of a side have the same bits, one is
        recomputed."""
        latest: dict[SideName, tuple[Pass, RefereedUnit]] = {}
        units = []
        for p in passes:
            errors, rows, reason, other_weight = None, 0, "", False
            try:
                errors, rows = self._errors(site, p, latest.get(p.side))
            except NotRefereed as error:
                reason, other_weight = str(error), isinstance(error, OtherWeight)
                parameter = site.operator.parameter or site.name
                old = p.trace.record.old_weights.get(parameter) if other_weight else None
                reason = "; ".join(filter(None, [reason, old]))
            unit = RefereedUnit(
                side=p.side,
                passname=p.name,
                edges=p.edges,
                site=site.name,
                layer=site.layer,
                op=site.op,
                op_class=site.op_class,
                rows=rows,
                errors=errors,
                reason=reason,
                dtype=p.trace.record.dtype,
                other_weight=other_weight,
                explanation=_explanation(site, p, errors) or self._shifted(site, p, errors),
                settings=_settings(site, p),
                fused_with=p.fused.get(site.name, ""),
                code=p.trace.record.code.get(site.name),
            )
            latest[p.side] = (p, unit)
            units.append(unit)
        return units

    def _errors(
        self, site: Site, p: Pass, before: tuple[Pass, RefereedUnit] | None
    ) -> tuple[RoundingErrors, int]:
        """`before`: another pass of the same side, and its result."""
        if isinstance(p.reference, str):
            raise NotRefereed(p.reference)
        site = as_recorded(site, self._sites, p.recorded.unexposed)
        number = p.recorded.comparable(site)
        known = before[1].errors if before else None
        if before and known and p.recorded.same(before[0].recorded, site, number):
            return known, len(number)
        return self._sums(site, p, p.reference, number).errors(self._index), len(number)

    def _shifted(self, site: Site, p: Pass, errors: RoundingErrors | None) -> str:
        """Explains a rotation, and that of its partner, by positions that are all shifted by the
        number that was measured in layer 0; empty if this does not explain both."""
        shift = p.trace.read_pass(p.name).record.positions.one_shift
        if site.operator.formula != "rotary" or errors is None or not shift:
            return ""
        for op in ("q_rope", "k_rope"):
            partner = self._sites[f"layers.{site.layer}.{op}"]
            try:
                number = p.recorded.comparable(partner)
                assert isinstance(p.reference, Reference)
                found = self._sums(partner, p, p.reference, number, shift).errors(self._index)
            except NotRefereed:
                return ""
            if not found.rms * EXPLAINED < errors.rms:
                return ""
        return f"turned by positions that are all shifted by {shift:+d}; {SHIFT_IS_HARMLESS}"

    def _sums(
        self, site: Site, of: Pass, reference: Reference, number: np.ndarray, shift: int = 0
    ) -> ErrorSums:
        """`shift`: a number that is added to every position."""
        dtype, heads = reference.rounded_to(site), reference.heads(site)
        sums = ErrorSums(reference.features(site), heads, dtype, self._device)
        compared = max(1, self._block // site.features)
        for part in self._blocks(number, site, reference.shape):
            got = of.recorded.values(site.name, part)
            rows = self._rows(part, shift)
            first = int(part[0] - self._index.position[part[0]])
            inputs = of.recorded.operands(site, part, np.arange(first, part[-1] + 1))
            exact, variance, shared = reference.exact(site, inputs, rows)
            got = reference.got(site, got, inputs)
            exact = reference.nearest(site, exact, got, inputs)
            for start in range(0, len(part), compared):
                at = slice(start, start + compared)
                sums.add(got[at], exact[at], variance[at], shared[at], part[at])
        return sums

    def _blocks(self, number: np.ndarray, site: Site, shape: ModelShape) -> Iterator[np.ndarray]:
        """Yields rows in blocks of bounded size. If the operator reads whole sequences, a block has
        rows of one sequence."""
        entries, width = self._block, max(site.features, shape.intermediate)
        position = self._index.position
        cuts = np.zeros(0, dtype=np.int64)
        if site.operator.formula == "linear":
            # Blocks are large, because each one converts the weight to float64 again.
            entries = PRODUCT_ELEMENTS
        elif site.operator.formula == "log_softmax":
            width = shape.vocab
        elif site.prefix_inputs:
            cuts = np.flatnonzero(np.diff(number - position[number])) + 1
            width = max(width, shape.heads * (int(position[number].max()) + 1))
        step = max(1, entries // width)
        if site.operator.op_class == "recurrence":
            # Each block starts with the sequence.
            step = len(number)
        for group in np.split(number, cuts):
            yield from (group[at : at + step] for at in range(0, len(group), step))

    def _rows(self, number: np.ndarray, shift: int) -> RowTokens:
        index = self._index
        position = index.position[number] + shift
        columns = (position, index.token[number], self._target[number], index.sample[number])
        return RowTokens(*(torch.from_numpy(c).to(self._device) for c in columns))
