"""A record of another schema, or with values that cannot be, is none."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from synthetic import compared_run, corrupt, draw

from rlk_align.results import Comparison
from rlk_align.trace.run import RunRecord


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A comparison.json with a difference in it."""
    faulty = corrupt(draw(), "layers.1.act", [(1, 4)])
    folder = compared_run(tmp_path_factory.mktemp("record") / "run", faulty).folder
    return (folder / "comparison.json").read_text()


def changed(record: str, where: str, value: Any) -> str:
    document = json.loads(record)
    *path, last = [int(k) if k.isdecimal() else k for k in where.split("/")]
    parent = document
    for key in path:
        parent = parent[key]
    assert parent[last] != value, "it is so already"
    parent[last] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("edges/0/metrics/mean_abs_dlogp", -0.1),
        ("edges/0/metrics/mean_abs_dlogp", 1e9),
        ("edges/0/metrics/max_abs_dlogp", 0.0),
        ("edges/0/metrics/bit_mismatches", 0),
        ("edges/0/metrics/bit_mismatches", -1),
        ("edges/0/metrics/bit_mismatches", 10**6),
        ("edges/0/metrics/tokens", -5),
        ("edges/0/metrics/k3", -1.0),
        ("edges/0/metrics/clip_fraction", 1.5),
        ("edges/0/metrics/ess_fraction", -0.5),
        ("edges/0/metrics/token_mult_prob_error", 0.5),
        ("edges/0/sites/0/differ", 10**6),
        ("edges/0/sites/0/introduced", 1),
        ("edges/0/sites/0/rows", -1),
        ("edges/0/sites/0/max_abs", -1.0),
        ("edges/0/sites/0/site", "layers.1.act"),
        ("edges/0/first_bitwise/site", "layers.9.act"),
        ("edges/0/paired_rows", 10**6),
        ("edges/0/name", "decode_vs_nothing"),
        ("edges", []),
        ("judged", []),
        ("judged", ["decode_vs_train"]),
        ("engines", {}),
        ("controls/noise", {}),
        ("controls/observer", "perfect"),
        ("tokens", -1),
        ("allowed", ["luck"]),
    ],
)
def test_values_out_of_their_range_are_refused(record: str, where: str, value: Any) -> None:
    Comparison.model_validate_json(record)
    with pytest.raises(ValidationError):
        Comparison.model_validate_json(changed(record, where, value))


@pytest.mark.parametrize("schema", ["rlk-align/comparison/1", "rlk-align/verdict/1", "", None])
def test_another_schema_is_refused(record: str, schema: str | None) -> None:
    with pytest.raises(ValidationError, match="schema_id"):
        Comparison.model_validate_json(changed(record, "schema_id", schema))


@pytest.mark.parametrize("captures", [{}, {"judge": "captures/x"}, {"rollout": 1}])
def test_a_run_without_captures_is_refused(captures: dict) -> None:
    with pytest.raises(ValidationError, match="captures"):
        RunRecord(command=[], captures=captures)


def test_a_nan_is_kept_for_the_judge(record: str) -> None:
    found = Comparison.model_validate_json(changed(record, "edges/0/metrics/k3", "NaN"))
    assert found.edges[0].metrics.k3 != found.edges[0].metrics.k3
    assert Path(found.model).name == "synthetic"
