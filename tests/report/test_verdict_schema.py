"""docs/verdict.schema.json says what the verdict's JSON holds, and no more."""

import json
from pathlib import Path
from typing import Any

import pytest
from comparisons import metrics
from inprocess import command
from jsonschema import Draft202012Validator
from report_runs import report_run

from rlk_align.judge.load import load_contract
from rlk_align.report.verdict_json import too_few_json
from rlk_align.results import GraphReplays, Mismatch, ProductionPass, SamplingDistribution

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/verdict.schema.json").read_text("utf-8"))
RUNS: dict[str, dict[str, Any]] = {
    "healthy": {
        "probed": False,
        "distributions": {"rollout": SamplingDistribution(temperature=0.7)},
    },
    "failing": {"over": ["layers.1.act"], "nan": ["layers.0.act"]},
    "production": {
        "production": metrics(),
        "production_passes": {
            "decode": ProductionPass(
                metrics=metrics(),
                expected=100,
                parted=[(1, 7)],
                graphs=GraphReplays(
                    steps=2, replayed_steps=1, replays={"full": 1}, captured={"full": 9}
                ),
            ),
            "prefill": ProductionPass(metrics=metrics(), expected=100),
        },
    },
    "stopped": {"mismatches": [Mismatch(kind="tokens", name="0", rollout="1", train="2")]},
}


def wrong(record: object) -> list[str]:
    return [e.message for e in Draft202012Validator(SCHEMA).iter_errors(record)]


@pytest.mark.parametrize("name", RUNS)
def test_a_verdict_is_what_the_schema_says(name: str, tmp_path: Path) -> None:
    run = report_run(tmp_path / "run", **RUNS[name])
    command("gate", run.folder, "--output", f"json={tmp_path / 'verdict.json'}")
    record = json.loads((tmp_path / "verdict.json").read_text(encoding="utf-8"))
    assert wrong(record) == []
    assert ("units" in record) == (name != "healthy")


def test_a_comparison_that_was_not_started_too() -> None:
    assert wrong(too_few_json(load_contract("bf16", "bfloat16"), "m", "bfloat16", "few")) == []


def test_the_schema_catches_what_it_does_not_know(tmp_path: Path) -> None:
    run = report_run(tmp_path / "run")
    command("gate", run.folder, "--output", f"json={tmp_path / 'verdict.json'}")
    record = json.loads((tmp_path / "verdict.json").read_text(encoding="utf-8"))
    assert wrong(record | {"status": "passed"})
    assert wrong(record | {"mood": "good"})
    assert wrong({k: v for k, v in record.items() if k != "doubts"})
    record["edges"]["prefill_vs_train"]["tokens"] = None
    assert wrong(record)
