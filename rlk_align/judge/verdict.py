"""Comparison + Contract -> Verdict. Needs neither an engine nor torch."""

import math
from typing import Literal

from rlk_align.errors import EXIT_FAIL, EXIT_INCONCLUSIVE, EXIT_PASS
from rlk_align.judge.contract import Contract, Limit
from rlk_align.results import Comparison, EdgeResult, Noise, Result, SiteResult

PARITY_KINDS = ("tokens", "weights", "attributes")

Status = Literal["pass", "fail", "inconclusive"]


class Breach(Result):
    """One limit that does not hold."""

    limit: str
    metric: str
    value: float
    fail: float
    site: str | None
    edge: str


class Verdict(Result):
    """Whether the two policies are the same, and why one may say so."""

    status: Status
    exit_code: int
    contract: Contract
    comparison: Comparison
    breaches: list[Breach]
    doubts: list[str]
    """Reasons for which nothing can be concluded."""
    notes: list[str]
    """What a reader should know of what was judged."""


def judge(comparison: Comparison, contract: Contract) -> Verdict:
    """Holds a comparison against a contract. Doubt outweighs a breach, a breach a pass."""
    doubts = list(_doubts(comparison, contract))
    breaches: list[Breach] = []
    if not comparison.stopped:
        for edge in comparison.edges:
            if edge.name in comparison.judged:
                breaches += _breaches(edge, contract)
        breaches, within_noise = _beyond_noise(breaches, comparison)
        doubts += within_noise
    status: Status
    if doubts:
        status, code = "inconclusive", EXIT_INCONCLUSIVE
    elif breaches:
        status, code = "fail", EXIT_FAIL
    else:
        status, code = "pass", EXIT_PASS
    return Verdict(
        status=status,
        exit_code=code,
        contract=contract,
        comparison=comparison,
        breaches=breaches,
        doubts=doubts,
        notes=_notes(comparison, contract),
    )


def parity(comparison: Comparison, kind: str) -> str:
    """`equal`, `mismatch`, or `mismatch allowed`."""
    if not any(m.kind == kind for m in comparison.mismatches):
        return "equal"
    return "mismatch allowed" if kind in comparison.allowed else "mismatch"


def coverage(comparison: Comparison) -> tuple[int, int]:
    """(paired, expected) rows over the judged edges."""
    edges = [e for e in comparison.edges if e.name in comparison.judged]
    return sum(e.paired_rows for e in edges), sum(e.expected_rows for e in edges)


def _doubts(c: Comparison, contract: Contract) -> list[str]:
    if c.stopped:
        kinds = dict.fromkeys(m.kind for m in c.mismatches if m.kind not in c.allowed)
        return [f"precheck: {', '.join(kinds)} differ between the sides"]
    doubts = [f"{name} was not compared: {why}" for name, why in c.missing_edges.items()]
    paired, expected = coverage(c)
    if not paired >= contract.min_coverage * expected or not paired:
        doubts.append(f"coverage: {paired} of {expected} rows paired")
    for edge in c.edges:
        if edge.name in c.judged:
            doubts += [
                f"{edge.name}: {site}: {reason}"
                for site, reason, explained in edge.unpaired
                if not explained
            ]
            if not edge.metrics.tokens >= contract.min_tokens:
                doubts.append(
                    f"{edge.name}: {edge.metrics.tokens} sampled tokens, "
                    f"{contract.min_tokens} are needed"
                )
    if c.controls is None or c.controls.observer == "violated":
        detail = "; ".join(c.controls.observer_detail) if c.controls else "no control"
        doubts.append(f"observer: {detail}")
    return doubts


def _notes(c: Comparison, contract: Contract) -> list[str]:
    """Untested versions, other versions of torch on the two sides, and operators that no tolerance
    was held against because their values were not kept."""
    notes = [
        f"{role}: {e.environment['untested']}"
        for role, e in c.engines.items()
        if "untested" in e.environment
    ]
    versions = [e.environment.get("torch", "") for e in c.engines.values()]
    if len(set(versions)) > 1:
        roles = [f"{role} {v}" for role, v in zip(c.engines, versions, strict=True)]
        notes.append(f"two versions of torch: {', '.join(roles)}; its own kernels may differ")
    if not any(limit.metric == "op_error" for limit in contract.limits):
        return notes
    for edge in c.edges:
        sites = [s.site for s in edge.sites if s.introduced and not s.valued_rows]
        if sites and edge.name in c.judged:
            kept = f"{edge.name}: operator limits were not held against {', '.join(sites)}"
            notes.append(f"{kept}: their values were not kept")
    return notes


def _breaches(edge: EdgeResult, contract: Contract) -> list[Breach]:
    found = [_nonfinite(edge, s) for s in edge.sites if s.nonfinite]
    for limit in contract.limits:
        if limit.edges is not None and edge.name not in limit.edges:
            continue
        if not limit.of_site:
            found += _check(limit, edge.name, None, float(getattr(edge.metrics, limit.metric)))
            continue
        for site in edge.sites:
            if limit.op_classes is None or site.op_class in limit.op_classes:
                found += _check(limit, edge.name, site.site, _site_value(limit, site))
    return found


def _check(limit: Limit, edge: str, site: str | None, value: float) -> list[Breach]:
    if value <= limit.fail:
        return []
    return [
        Breach(
            limit=limit.id,
            metric=limit.metric,
            value=value,
            fail=limit.fail,
            site=site,
            edge=edge,
        )
    ]


def _site_value(limit: Limit, site: SiteResult) -> float:
    if limit.metric == "rows_differ":
        return float(site.differ)
    assert limit.atol is not None
    assert limit.rtol is not None
    return tolerance_ratio(site.frontier, limit.atol, limit.rtol)


def tolerance_ratio(frontier: list[tuple[float, float]], atol: float, rtol: float) -> float:
    """Largest error / (atol + rtol * magnitude): at most 1 where all errors are tolerated."""
    ratios = [
        error / bound if (bound := atol + rtol * magnitude) else math.inf
        for magnitude, error in frontier
    ]
    return max(ratios, default=0.0)


def _nonfinite(edge: EdgeResult, site: SiteResult) -> Breach:
    return Breach(
        limit="finite",
        metric="nonfinite",
        value=float(site.nonfinite),
        fail=0.0,
        site=site.site,
        edge=edge.name,
    )


def _beyond_noise(breaches: list[Breach], c: Comparison) -> tuple[list[Breach], list[str]]:
    """Breaches that an engine's own noise cannot explain, and doubts about the others.

    Where an engine does not repeat itself bit for bit, a bound on |Δ| must be exceeded by more
    than it differs from itself, and rows that it does not reproduce prove nothing.
    """
    floors = [n for n in (c.controls.noise.values() if c.controls else ()) if isinstance(n, Noise)]
    if not floors:
        return breaches, []
    floor = {
        "max_abs_dlogp": max(n.max_abs_dlogp for n in floors),
        "mean_abs_dlogp": max(n.mean_abs_dlogp for n in floors),
    }
    sites = {(e.name, s.site): s for e in c.edges for s in e.sites}
    kept, doubts = [], []
    for breach in breaches:
        site = sites.get((breach.edge, breach.site or "logprob"))
        noisy = float(site.noisy) if site is not None else 0.0
        allowance = floor.get(breach.metric, noisy if breach.metric in _COUNTS else 0.0)
        if breach.value <= allowance:
            where = f"{breach.site or ''} {breach.metric}".strip()
            doubts.append(f"{breach.edge}: {where} is within the engines' own noise")
        else:
            kept.append(breach)
    return kept, doubts


_COUNTS = ("rows_differ", "bit_mismatches")


def divergence_edge(c: Comparison) -> EdgeResult | None:
    """`prefill_vs_train`, or the first edge judged."""
    edges = [e for e in c.edges if e.name in c.judged]
    return next((e for e in edges if e.name == "prefill_vs_train"), edges[0] if edges else None)
