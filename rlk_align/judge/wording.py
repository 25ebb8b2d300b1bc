"""Describes in words how an operator is off: the pattern of its error, and its budget."""

from collections.abc import Mapping

from rlk_align.judge.budgets import bounds_of, budget_of, exceeded
from rlk_align.judge.checks import quantised_operators
from rlk_align.judge.contract import Contract
from rlk_align.judge.verdict import Verdict, parity
from rlk_align.results import EdgeResult, ErrorPattern, RefereedUnit, RoundingErrors


def how_off(unit: RefereedUnit, contract: Contract) -> str:
    """Describes an operator's error, e.g. `scaled by 1.02; errors of 12.3 roundings, 1.3 allowed`,
    after the settings in which the engine differs from config.json. Empty for an operator within
    its budget."""
    errors, bounds, over = unit.errors, bounds_of(contract, unit), exceeded(contract, unit)
    if errors is None or bounds is None or not over:
        return ""
    name = over[0] if "rms" in over else max(over, key=lambda n: _share(errors, bounds, n))
    value, allowed = getattr(errors, name), bounds[name]
    figure = f"{_FIGURES[name]} {abs(value):.3g} roundings, {allowed:.3g} allowed"
    looks = unit.explanation or _looks(errors.pattern)
    if not looks and name == "row_gain":
        looks = f"rows scaled by ±{share(errors.row_gain * errors.unit)}"
    if looks.startswith("rows scaled") and errors.row_gain < LOW_PRECISION:
        looks += ", as by statistics in low precision"
    return "; ".join(filter(None, [*map(str, unit.unlike_config), looks, figure]))


def why_legitimate(verdict: Verdict, edge: EdgeResult, site: str) -> str:
    """Explains in one sentence a difference that is due to the rounding of both sides; empty where
    it is not, or where that is not known."""
    units = [u for u in verdict.comparison.referee if u.site == site and edge.name in u.edges]
    budgets = {u.side: budget_of(verdict.contract, u) for u in units}
    if any(u.errors is None or how_off(u, verdict.contract) for u in units):
        return ""
    rms = {u.side: u.errors.rms for u in units if u.errors is not None}
    if rms and verdict.comparison.casts and not any(rms.values()):
        return f"legitimate: weights are {parity(verdict.comparison, 'weights')}"
    if len(rms) < 2 and edge.name != "decode_vs_prefill":
        return ""
    allowed = [f"{b.rms:g}" for b in budgets.values() if b is not None]
    if not allowed or len(allowed) < len(budgets):
        return ""
    errors = " and ".join(f"{value:.2g}" for value in rms.values())
    figures = (
        f"{' and '.join(rms)} {'have' if len(rms) > 1 else 'has'} errors of {errors} roundings"
    )
    most = " and ".join(allowed if len(set(allowed)) > 1 else allowed[:1])
    quantised = site.rpartition(".")[2] in quantised_operators(edge, verdict.comparison)
    cause = "quantisation" if quantised else "legitimate rounding"
    beside = "float64 with its own weights" if quantised else "float64"
    return f"{cause}: compared with {beside}, {figures}, where {most} are allowed"


LOW_PRECISION = 2.0
"""Rows that are scaled by fewer roundings than this point to statistics in the model's dtype."""
_FIGURES = {
    "rms": "errors of",
    "gain": "a common factor that is off by",
    "row_gain": "rows scaled by",
    "head_gain": "a head scaled by",
    "feature_rms": "one feature with errors of",
    "feature_gain": "one feature scaled by",
    "feature_shift": "one feature shifted by",
    "row_rms": "one row with errors of",
    "peak": "one entry with an error of",
}


def _share(errors: RoundingErrors, bounds: Mapping[str, float], name: str) -> float:
    """Returns the share of a budget that is used."""
    value, allowed = getattr(errors, name), bounds[name]
    return abs(value) / allowed if allowed else float("inf")


def share(value: float) -> str:
    """Writes a share as a percentage, or as a power of ten where that would be 0.00 %."""
    return f"{value:.2%}" if value >= 5e-5 else f"{value:.1e}"


def _factor(amount: float) -> str:
    """Writes 1 + amount. Where four digits would leave few of the amount's, it keeps two of
    them."""
    if not abs(amount) < _NEAR_ONE:
        return f"{1 + amount:.4g}"
    return f"1 {'-' if amount < 0 else '+'} {abs(amount):.2g}"


_NEAR_ONE = 0.01


def _looks(pattern: ErrorPattern) -> str:
    places = {
        "everywhere": "",
        "row": "one row only: ",
        "token": f"at token id {pattern.at} only: ",
        "position": f"at position {pattern.at} only: ",
        "feature": f"feature {pattern.at} only: ",
        "channel": f"channel {pattern.at} of every head: ",
        "head": f"head {pattern.at} only: ",
    }
    manners = {
        "scaled": f"scaled by {_factor(pattern.amount)}",
        "shifted": f"shifted by {pattern.amount:+.3g}",
        "rows scaled": f"rows scaled by ±{share(pattern.amount)}",
        "scattered": "",
    }
    return f"{places[pattern.place]}{manners[pattern.manner]}".rstrip(": ")
