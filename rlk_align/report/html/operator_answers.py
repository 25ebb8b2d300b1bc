"""Four answers to "which operator", for an edge; they usually differ."""

from rlk_align.judge.verdict import over_budget
from rlk_align.report.source import ReportSource
from rlk_align.report.words import rank_words, site_figures, whose_off
from rlk_align.results import EdgeResult

_NO_PROBE = "unknown; find out with: rlk-align probe RUN"
_NO_ATTRIBUTION = "unknown; find out with: rlk-align probe RUN --attribute"


def answers(source: ReportSource, edge: EdgeResult) -> list[tuple[str, str]]:
    """Returns the questions with their answers."""
    return [
        ("where drift starts", _first(edge)),
        ("first beyond its budget", _over(source, edge)),
        ("contributes most to Δlogp", _contributor(source, edge)),
        ("amplifies most", _amplifier(source, edge)),
    ]


def _first(edge: EdgeResult) -> str:
    first = edge.first_bitwise
    if first is None:
        return f"nowhere: {len(edge.sites)} of {len(edge.sites)} sites are bit-equal"
    site = next(s for s in edge.sites if s.site == first.site)
    since = f"; everything is equal up to {first.last_equal}" if first.last_equal else ""
    where = f"sample {first.sample}, position {first.position}"
    ranks = f"; {words}" if (words := rank_words(first)) else ""
    return f"{first.site}, first at {where}; {site_figures(site)}{since}{ranks}"


def _over(source: ReportSource, edge: EdgeResult) -> str:
    over = over_budget(source.verdict, edge)
    if over:
        return f"{over[0].unit.site}: {whose_off(over[0])}"
    if not source.verdict.contract.budgets:
        return f"unknown: contract {source.verdict.contract.id} has no budgets"
    units = [u for u in source.verdict.comparison.referee if edge.name in u.edges]
    done = sum(u.errors is not None for u in units)
    return f"none: {done} of {len(units)} operators of both sides were recomputed in float64"


def _contributor(source: ReportSource, edge: EdgeResult) -> str:
    probed = source.probe.edge(edge.name) if source.probe else None
    attribution = probed.attribution if probed else None
    if attribution is None:
        return _NO_ATTRIBUTION
    whole = sum(map(abs, attribution.whole)) / max(1, len(attribution.whole))
    if attribution.largest is None:
        return f"no operator was measured by itself; mean |Δlogp| is {whole:.2g}"
    top = attribution.largest
    return f"{top.units[0]}: mean |Δlogp| {top.mean_abs:.2g} by itself, of {whole:.2g} in all"


def _amplifier(source: ReportSource, edge: EdgeResult) -> str:
    probed = source.probe.edge(edge.name) if source.probe else None
    moved = probed.amplification if probed else None
    if moved is None or moved.largest is None or moved.largest.gain is None:
        return _NO_PROBE
    return (
        f"{moved.largest.name}, × {moved.largest.gain:.2g}; one ulp at {moved.perturbed} moves "
        f"log-probs by up to {moved.max_abs_dlogp:.2g}"
    )
