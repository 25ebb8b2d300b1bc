"""A rescored dump for programs: the record of its explanation, with the edges of its mismatch."""

from typing import Any

from rlk_align.logs.rescore.record import Rescored, SplitEdge
from rlk_align.logs.rescore.words import WHAT
from rlk_align.report.explained import next_command
from rlk_align.report.explained_json import explained_record, interval_json
from rlk_align.report.rescored import chosen, temperature
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
        "next": next_command(rescored.next, DUMP=dump, RUN=scores),
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
        "mean": interval_json(edge.mean),
        "share": interval_json(edge.share),
        "mean_ratio": interval_json(edge.mean_ratio),
        "c": interval_json(edge.c),
        "c_limit": edge.c_limit,
        "diagnosis": edge.diagnosis,
    }
