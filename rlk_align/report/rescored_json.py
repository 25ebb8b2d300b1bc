"""A rescored dump for programs: the record of its explanation, with the edges of its mismatch."""

from typing import Any

from rlk_align.interval import Estimate
from rlk_align.logs.rescore.record import Rescored, SplitEdge
from rlk_align.logs.rescore.words import WHAT
from rlk_align.report.explained_json import explained_record
from rlk_align.report.rescored_words import chosen, next_command, temperature
from rlk_align.report.verdict_json import finite, record_text


def rescored_json(rescored: Rescored, dump: str, scores: str) -> str:
    """Renders the verdict on a rescored dump as a JSON file."""
    record = explained_record(rescored.explained, dump)
    record |= {
        "status": rescored.status,
        "exit_code": rescored.exit_code,
        "engines": {
            side: e.model_dump(include={"name", "version", "options", "dtype", "environment"})
            for side, e in rescored.engines.items()
        },
        "edges": {edge.name: _edge(edge) for edge in rescored.edges},
        "dump": rescored.own.model_dump(),
        "breaches": record["breaches"]
        + [
            {"limit": name, "metric": metric, "value": value, "fail": limit}
            | {"site": None, "edge": edge}
            for edge, (name, metric, value, limit) in rescored.breaches
        ],
        "doubts": list(rescored.doubts),
        "notes": [chosen(rescored), temperature(rescored), *rescored.notes],
        "carrier": rescored.carrier,
        "odd": rescored.odd,
        "split": rescored.sentence,
        "next": next_command(rescored.next, dump, scores),
        "rescored": {
            "sequences": rescored.chosen,
            "worst": rescored.worst,
            "usable": rescored.usable,
            "tokens": rescored.own.tokens,
            "missing": rescored.missing,
            "temperature": rescored.temperature,
            "run": scores,
        },
    }
    return record_text(finite(record))


def _edge(edge: SplitEdge) -> dict[str, Any]:
    return edge.metrics.model_dump() | {
        "what": WHAT[edge.name],
        "mean": _interval(edge.mean),
        "share": _interval(edge.share),
        "mean_ratio": _interval(edge.mean_ratio),
        "c": _interval(edge.c),
        "c_limit": edge.c_limit,
        "diagnosis": edge.diagnosis,
    }


def _interval(estimate: Estimate) -> dict[str, float]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}
