"""The explanation of an imported run, for programs: the record `rlk-align/verdict/1` with
diagnoses."""

from typing import Any

from rlk_align.interval import Estimate
from rlk_align.logs.diagnose.explain import Explanation
from rlk_align.report.explained import BLIND, next_command, sentence
from rlk_align.report.verdict_json import finite, record_text


def explained_json(explained: Explanation, folder: str) -> str:
    """Renders the verdict on a run as a JSON file."""
    return record_text(explained_record(explained, folder))


def explained_record(explained: Explanation, folder: str) -> dict[str, Any]:
    """Returns the published record; fields that only engines can fill are empty."""
    contract, counts = explained.contract, explained.counts
    record = {
        "schema": "rlk-align/verdict/1",
        "status": explained.status,
        "exit_code": explained.exit_code,
        "contract": {
            "id": contract.id,
            "version": contract.version,
            "sha256": contract.sha256,
        },
        "model": None,
        "dtype": explained.dtype,
        "tokens": counts.compared,
        "engines": {},
        "precheck": {
            **dict.fromkeys(("tokens", "weights", "attributes"), "not checked"),
            "mismatches": [],
        },
        "controls": {},
        "coverage": {
            "paired": counts.compared,
            "expected": counts.scored,
            "fraction": counts.compared / counts.scored if counts.scored else 0.0,
            "unpaired": [],
        },
        "edges": {},
        "divergence": None,
        "divergences": {},
        "breaches": [
            {"limit": name, "metric": metric, "value": value, "fail": limit}
            | {"site": None, "edge": "rollout_vs_train"}
            for name, metric, value, limit in explained.breaches
        ],
        **{name: [] for name in ("warnings", "waived", "waivers")},
        "doubts": explained.doubts,
        "untested": [x.model_dump() for x in explained.untested],
        "notes": [f"a dump cannot tell: {what}" for what in BLIND],
        "sentence": sentence(explained),
        "mean_ratio": interval_json(explained.mean_ratio),
        "c": interval_json(explained.c),
        "sampled_sequences": explained.sampled,
        "diagnoses": [
            d.model_dump() | {"next": next_command(d.next, RUN=folder)} for d in explained.diagnoses
        ],
    }
    return finite(record)


def interval_json(estimate: Estimate) -> dict[str, float]:
    """Returns a value and the bounds of its interval."""
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}
