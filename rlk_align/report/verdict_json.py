"""The verdict for programs: the record `rlk-align/verdict/1`."""

import json
import math
from typing import Any, Literal

from rlk_align.errors import EXIT_INCONCLUSIVE
from rlk_align.judge.contract import Contract
from rlk_align.judge.verdict import (
    PARITY_KINDS,
    OverBudget,
    Verdict,
    cached_rows,
    cause_of,
    coverage,
    headline,
    over_budget,
    parity,
)
from rlk_align.judge.wording import how_off
from rlk_align.probe.attribution_record import Contribution
from rlk_align.probe.record import Probe, ProbedEdge
from rlk_align.probe.unit_record import Unit
from rlk_align.report.probe_units import probed_units
from rlk_align.report.routing_words import routing_json
from rlk_align.report.sampling_distribution import distribution_words
from rlk_align.report.source import ReportSource
from rlk_align.results import Comparison, EdgeResult, Noise


def json_text(source: ReportSource) -> str:
    """Renders the verdict of a run as a JSON file."""
    return record_text(verdict_json(source.verdict, source.probe))


def record_text(record: dict[str, Any]) -> str:
    """Returns a record as JSON with a final line break."""
    return json.dumps(record, indent=1, allow_nan=False) + "\n"


def verdict_json(verdict: Verdict, probe: Probe | None = None) -> dict[str, Any]:
    """Returns the published record, with units where the run was probed; a NaN is null."""
    c, edge = verdict.comparison, headline(verdict)
    stopped = c.stopped
    record = {
        "schema": "rlk-align/verdict/1",
        "status": verdict.status,
        "exit_code": verdict.exit_code,
        "cause": cause_of(verdict),
        "contract": contract_json(verdict.contract),
        "model": c.model,
        "dtype": c.dtype,
        "tokens": c.tokens,
        "positions": {"tested": c.longest_sequence, "context": c.context},
        "engines": {
            role: e.model_dump(include={"name", "version", "options", "dtype", "environment"})
            for role, e in c.engines.items()
        },
        "precheck": {
            **{k: parity(c, k) for k in PARITY_KINDS},
            **{f"{s}_distribution": distribution_words(d) for s, d in c.distributions.items()},
            "mismatches": [m.model_dump(exclude={"stops"}) for m in c.mismatches],
        },
        "controls": _controls_json(c),
        "coverage": {} if stopped else _coverage_json(c),
        "edges": {} if stopped else _edges_json(c),
        "divergence": (None if stopped or edge is None else _divergence_json(verdict, edge, probe)),
        "divergences": {
            e.name: _divergence_json(verdict, e, probe)
            for e in ([] if stopped else c.edges)
            if e.name in c.judged
        },
        **_routing_json(verdict, probe),
        **({"units": _units_json(verdict, probe)} if probe else {}),
        "breaches": [b.model_dump(exclude={"waiver"}) for b in verdict.breaches],
        "warnings": [w.model_dump(exclude={"waiver"}) for w in verdict.warnings],
        "waived": [w.model_dump(exclude={"waiver"}) for w in verdict.waived],
        "waivers": [
            use.waiver.model_dump(mode="json") | use.model_dump(exclude={"waiver"})
            for use in verdict.waivers
        ],
        "doubts": verdict.doubts,
        "notes": verdict.notes,
    }
    return finite(record)


def contract_json(contract: Contract) -> dict[str, str]:
    """Returns the identity of the contract."""
    return {"id": contract.id, "version": contract.version, "sha256": contract.sha256}


def too_few_json(contract: Contract, model: str, dtype: str, doubt: str) -> dict[str, Any]:
    """Returns the record of a comparison that was not started; nothing was checked."""
    return {
        "schema": "rlk-align/verdict/1",
        "status": "inconclusive",
        "exit_code": EXIT_INCONCLUSIVE,
        "cause": None,
        "contract": contract_json(contract),
        "model": model,
        "dtype": dtype,
        "tokens": 0,
        "positions": {"tested": 0, "context": 0},
        "engines": {},
        "precheck": {**dict.fromkeys(PARITY_KINDS, "not checked"), "mismatches": []},
        "controls": {},
        "coverage": {},
        "edges": {},
        "divergence": None,
        "divergences": {},
        **{name: [] for name in ("breaches", "warnings", "waived", "waivers")},
        "doubts": [doubt],
        "notes": [],
    }


def _controls_json(c: Comparison) -> dict[str, Any]:
    if c.controls is None:
        return {}
    noise = {
        side: n.model_dump() if isinstance(n, Noise) else n or "bitwise"
        for side, n in c.controls.noise.items()
    }
    production = "not measured" if c.production is None else c.production.model_dump()
    return {
        "observer": c.controls.observer,
        "observer_detail": c.controls.observer_detail,
        "noise_floor": noise,
        "production_vs_observed": production,
        "production": {
            name: found.model_dump() | {"cuda_graph_replays": found.replays}
            for name, found in c.production_passes.items()
        },
    }


def _coverage_json(c: Comparison) -> dict[str, Any]:
    paired, expected = coverage(c)
    unpaired = {
        (site, reason): {"site": site, "reason": reason}
        for edge in c.edges
        if edge.name in c.judged
        for site, reason, _ in edge.unpaired
    }
    return {
        "paired": paired,
        "expected": expected,
        "fraction": paired / expected if expected else 0.0,
        "served_from_cache": cached_rows(c),
        "unpaired": list(unpaired.values()),
    }


def _edges_json(c: Comparison) -> dict[str, Any]:
    edges: dict[str, Any] = {
        e.name: e.metrics.model_dump() | ({"distribution": d.model_dump()} if d else {})
        for e in c.edges
        for d in [e.distribution]
    }
    if c.production is not None:
        edges["production_vs_observed"] = c.production.model_dump()
    return edges


def _routing_json(verdict: Verdict, probe: Probe | None) -> dict[str, Any]:
    """Returns the routing of a sparse model, by edge."""
    c = verdict.comparison
    routing = {e.name: routing_json(e, verdict.contract, probe) for e in c.edges if e.routing}
    return {"routing": routing} if routing and not c.stopped else {}


def _divergence_json(verdict: Verdict, edge: EdgeResult, probe: Probe | None) -> dict[str, Any]:
    over = [_over_budget_json(verdict, operator) for operator in over_budget(verdict, edge)]
    probed = probe.edge(edge.name) if probe else None
    return {
        "edge": edge.name,
        "first_bitwise": edge.first_bitwise.model_dump() if edge.first_bitwise else None,
        "first_over_budget": over[0] if over else None,
        "over_budget": over,
        "largest_contributor": _contributor_json(probed) if probed else None,
        "largest_amplifier": _amplifier_json(probed) if probed else None,
    }


def _contributor_json(probed: ProbedEdge) -> dict[str, Any] | None:
    largest = probed.attribution.largest if probed.attribution else None
    return {"site": largest.units[0], **_contribution_json(largest)} if largest else None


def _contribution_json(part: Contribution) -> dict[str, Any]:
    """Returns effects in nats over the tokens; the mean averages patching in first and removing
    last."""
    return {"mean_abs_dlogp": part.mean_abs, "mean_dlogp": part.mean}


def _amplifier_json(probed: ProbedEdge) -> dict[str, Any] | None:
    moved = probed.amplification
    if moved is None or moved.largest is None:
        return None
    return {
        "site": moved.largest.name,
        "gain": moved.largest.gain,
        "side": moved.side,
        "perturbed": moved.perturbed,
        "max_abs_dlogp": moved.max_abs_dlogp,
    }


def _units_json(verdict: Verdict, probe: Probe) -> list[dict[str, Any]]:
    return [
        {
            "edge": probed.name,
            **p.unit.model_dump(exclude={"edge"}),
            "gain": p.unit.gain,
            "introduced": _part(p.unit, "introduced"),
            "inherited": _part(p.unit, "inherited"),
            "over_budget": _over_budget_json(verdict, p.over) if p.over else None,
            "contribution": _contribution_json(p.contribution) if p.contribution else None,
        }
        for probed in probe.edges
        for p in probed_units(verdict, probed)
    ]


def _part(unit: Unit, which: Literal["introduced", "inherited"]) -> dict[str, Any] | None:
    part = unit.part(which)
    return part.model_dump() if part else None


def _over_budget_json(verdict: Verdict, over: OverBudget) -> dict[str, Any]:
    how: dict[str, str] = {}
    for u in over.units:
        words = how_off(u, verdict.contract)
        # Decode and prefill of one side may both be off.
        how[u.side] = f"{how[u.side]}; {u.passname}: {words}" if u.side in how else words
    region = sorted({u.fused_with for u in over.units if u.fused_with})
    code = {
        u.side: u.code.model_dump()
        for u in verdict.comparison.referee
        if u.site == over.unit.site and u.code is not None
    }
    settings = {u.side: [s.model_dump() for s in u.settings] for u in over.units}
    details = {
        "side": over.side,
        "how": how,
        "settings": {side: known for side, known in settings.items() if known},
        "computed_with": region,
        "code": code,
    }
    return over.unit.model_dump() | details


def finite(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON lacks, with null."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
