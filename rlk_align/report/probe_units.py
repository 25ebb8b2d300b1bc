"""Joins the units that a probe measured with the verdict: as records and as a section."""

from collections.abc import Iterator
from dataclasses import dataclass

from rlk_align.judge.verdict import OverBudget, Verdict, over_budget
from rlk_align.probe.attribution_record import Attribution, Contribution
from rlk_align.probe.record import ProbedEdge
from rlk_align.probe.unit_record import Unit
from rlk_align.report.document import DataTable, Section
from rlk_align.report.words import how_words

SHOWN = 16
"""The most introducers whose errors are described."""


@dataclass(frozen=True, slots=True)
class ProbedUnit:
    """A unit with its verdict and its contribution."""

    unit: Unit
    over: OverBudget | None
    contribution: Contribution | None
    """The unit's contribution; None where it was not requested, or where only the contribution of
    its layer was measured."""


def probed_units(verdict: Verdict, probed: ProbedEdge) -> list[ProbedUnit]:
    """Returns units over their budgets first, then introducers by the size of the introduced error,
    then the others in execution order."""
    edge = next((e for e in verdict.comparison.edges if e.name == probed.name), None)
    over = {o.unit.site: o for o in (over_budget(verdict, edge) if edge else [])}
    parts = contributions(probed.attribution)
    units = [
        ProbedUnit(u, next((over[s] for s in u.sites if s in over), None), parts.get(u.name))
        for u in probed.units
    ]
    return sorted(units, key=_urgency)


def _urgency(probed: ProbedUnit) -> tuple[bool, bool, float]:
    introduced = probed.unit.part("introduced")
    is_introducer = probed.unit.label == "introducer"
    size = introduced.rel_l2 if introduced and is_introducer else 0.0
    # Units over budget keep the execution order: an earlier one may be the cause.
    return probed.over is None, not is_introducer, 0.0 if probed.over else -size


def contributions(attribution: Attribution | None) -> dict[str, Contribution]:
    """Returns the contribution of each unit that was attributed alone."""
    if attribution is None:
        return {}
    alone = [c for c in attribution.layers if len(c.units) == 1]
    inside = [c for parts in attribution.operators.values() for c in parts]
    return {c.units[0]: c for c in (*alone, *inside)}


def summary(verdict: Verdict, probed: ProbedEdge) -> str:
    """Returns a summary, e.g. `introducers: 5, all within their budgets`."""
    units = probed_units(verdict, probed)
    count, over = len(probed.introducers), sum(u.over is not None for u in units)
    what = f"{over} beyond their budgets" if over else "all within their budgets"
    if not verdict.contract.budgets:
        what = f"contract {verdict.contract.id} has no budgets for them"
    unknown = sum(u.label == "undetermined" for u in probed.units)
    also = f"; {unknown} of {len(probed.units)} units undetermined" if unknown else ""
    return f"introducers: {count}, {what}{also}" if count else f"introducers: none{also}"


def probe_section(verdict: Verdict, probed: ProbedEdge) -> Section:
    """Returns the introducers as a table, with their effects."""
    units = [u for u in probed_units(verdict, probed) if u.over or u.unit.label == "introducer"]
    items = [
        f"{u.unit.name}: {where}: {how}"
        for u in units[:SHOWN]
        for where, how in (how_words(verdict, u.over) if u.over else ())
    ]
    if any(u.unit.region for u in units):
        items.append("* computed as one with the operator before it")
    for unit in [u for u in probed.units if u.label == "undetermined"][:1]:
        items.append(f"undetermined, from {unit.name} on: {unit.reason}")
    return Section(
        heading=f"probe ({probed.name})  {summary(verdict, probed)}",
        table=_table(units, probed.attribution is not None) if units else None,
        items=[*items, *_effects(probed)],
    )


def _table(units: list[ProbedUnit], attributed: bool) -> DataTable:
    effect = ["|Δlogp|"] if attributed else []
    return DataTable(
        name="introducers",
        caption="introducers",
        columns=("unit", "off", "introduced", "inherited", "gain", *effect),
        rows=[_cells(unit, attributed) for unit in units],
        names=2,
    )


def _cells(probed: ProbedUnit, attributed: bool) -> list[str]:
    unit, part = probed.unit, probed.contribution
    sizes = (unit.part("introduced"), unit.part("inherited"))
    cells = [f"{d.rel_l2:.2g}" if d else "" for d in sizes]
    cells.append(f"{unit.gain:.2g}" if unit.gain is not None else "")
    cells += [f"{part.mean_abs:.2g}" if part else ""] if attributed else []
    side = probed.over.side or "?" if probed.over else "–"
    return [f"{unit.sites[-1]}*" if unit.region else unit.name, side, *cells]


def _effects(probed: ProbedEdge) -> Iterator[str]:
    moved, attribution = probed.amplification, probed.attribution
    if attribution is not None:
        size = sum(map(abs, attribution.whole)) / max(1, len(attribution.whole))
        text = f"mean |Δlogp| {size:.2g} of the whole"
        if attribution.largest is not None:
            top = attribution.largest
            text += f"; largest contributor {top.units[0]}, {top.mean_abs:.2g} by itself"
        if attribution.unexplained:
            text += f"; {attribution.unexplained:.2g} left unexplained"
        yield text
    if moved is not None and moved.largest is not None and moved.largest.gain is not None:
        yield (
            f"one ulp at {moved.perturbed} moves log-probs by up to {moved.max_abs_dlogp:.2g}; "
            f"largest amplifier {moved.largest.name}, × {moved.largest.gain:.2g}"
        )
