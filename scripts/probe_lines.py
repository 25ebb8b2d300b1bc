"""What `probe_engines.py` tells of verdicts, units and contributions."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlk_align.judge.contract import STATISTICS
from rlk_align.judge.verdict import Verdict
from rlk_align.probe.units import Unit


def by_op(edge: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for site in edge.sites:
        if site.introduced:
            found[site.op] = found.get(site.op, 0) + site.introduced
    return found


def passes(folder: Path) -> dict[str, list[float]]:
    """Name -> seconds, and bytes on disk."""
    found = {}
    for path in sorted(folder.glob("*/pass.json")):
        record = json.loads(path.read_text())
        size = sum(f["size"] for f in record["files"].values())
        found[path.parent.name] = [round(record["seconds"], 2), size]
    return found


def rounding_table(verdict: Verdict) -> Iterator[dict[str, Any]]:
    """By operator, side and pass: the largest of each statistic, where, and its budget."""
    groups: dict[tuple[str, str, str], list[Any]] = {}
    skipped: dict[str, int] = {}
    for unit in verdict.comparison.referee:
        if unit.errors is None:
            skipped[unit.reason] = skipped.get(unit.reason, 0) + 1
            continue
        groups.setdefault((unit.op, unit.side, unit.passname), []).append(unit)
    for (op, side, passname), units in groups.items():
        largest = {}
        for name in STATISTICS:
            u = max(units, key=lambda u: abs(getattr(u.errors, name)))
            largest[name] = [getattr(u.errors, name), u.site]
        budget = verdict.contract.budget(op)
        over = [n for n, (v, _) in largest.items() if budget and not abs(v) <= getattr(budget, n)]
        yield {
            "op": op,
            "side": side,
            "pass": passname,
            "rows": [min(u.rows for u in units), max(u.rows for u in units)],
            "largest": largest,
            "over": over,
        }
    if skipped:
        yield {"op": "left out", "reasons": skipped}


def told(unit: Unit) -> dict[str, Any]:
    parts = {n: p and p.rel_l2 for n in ("introduced", "inherited") for p in [unit.part(n)]}
    return {
        "name": unit.name,
        "label": unit.label,
        "reason": unit.reason,
        "rows": [o.rows for o in unit.orders],
        "introduced_rows": [o.introduced_rows for o in unit.orders],
        "gain": unit.gain,
        "interaction": max((d.rel_l2 for d in unit.interaction), default=None),
        **parts,
    }


def summary(found: Any) -> dict[str, Any]:
    """Means over the tokens."""

    def mean(values: list[float]) -> float:
        return sum(values) / max(1, len(values))

    def line(c: Any) -> list[Any]:
        return [c.name, *c.mean, c.mean_abs, len(c.units)]

    def size(values: list[float]) -> float:
        return mean([abs(v) for v in values])

    return {
        "tokens": len(found.tokens),
        "whole": [mean(found.whole), size(found.whole)],
        "layers": [line(c) for c in found.layers],
        "interaction": [[mean(i), size(i)] for i in found.interaction()],
        "operators": {
            layer: [line(c) for c in sorted(parts, key=lambda c: -c.mean_abs)]
            for layer, parts in found.operators.items()
        },
        "interactions": {
            layer: [[mean(i), size(i)] for i in found.interaction(layer)]
            for layer in found.operators
        },
        "unexplained": found.unexplained,
        "left_out": found.left_out,
    }
