"""Formats of a monitored run for programs: a JSON line for each step, and Prometheus' text
format."""

import json
import math
from typing import Any

from rlk_align.logs.monitor.record import Interval, StepRecord
from rlk_align.text import printable

SCHEMA = "rlk-align/step/1"
PLAIN = (
    *("sequences", "tokens", "missing", "not_finite", "excess", "mean_abs", "k1", "k2", "ess"),
    *("clip_fraction", "kl_entropy", "outliers", "duplicated"),
    *("version_lag", "version_lag_max", "reward"),
)
"""The fields of a record that are numbers."""
INTERVALS = ("ratio_error", "c", "k2_scaled", "k3")


def json_line(run: str, record: StepRecord) -> str:
    """Returns the line of a step. NaN and infinity become null; `not_finite` counts them."""
    body: dict[str, Any] = {"schema": SCHEMA, "run": run} | record.model_dump()
    return json.dumps(_finite(body), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def scalars(record: StepRecord) -> dict[str, float]:
    """Returns the known numbers of a step by name, e.g. `ratio_error`, `ratio_error_low`, and
    `verl/rollout_corr/kl`."""
    numbers: dict[str, float] = {}
    for name in PLAIN:
        value = getattr(record, name)
        if value is not None:
            numbers[name] = float(value)
    for name in INTERVALS:
        interval: Interval | None = getattr(record, name)
        if interval is not None:
            numbers |= {name: interval.value, f"{name}_low": interval.low}
            numbers[f"{name}_high"] = interval.high
    for framework, metrics in record.frameworks.items():
        numbers |= {f"{framework}/{name}": value for name, value in metrics.items()}
    return numbers


def prometheus(latest: dict[str, StepRecord]) -> str:
    """Returns the latest step of each run in Prometheus' text format, for a textfile collector."""
    samples: dict[str, list[str]] = {}

    def add(name: str, value: float, /, **labels: str) -> None:
        inside = ",".join(f'{key}="{_label(text)}"' for key, text in labels.items())
        shown = "NaN" if math.isnan(value) else "+Inf" if value == math.inf else f"{value!r}"
        shown = "-Inf" if value == -math.inf else shown
        samples.setdefault(name, []).append(f"{name}{{{inside}}} {shown}")

    for run, record in latest.items():
        add("rlk_align_step", float(record.step), run=run)
        for name, value in scalars(record).items():
            framework, slash, metric = name.partition("/")
            if slash:
                add("rlk_align_framework", value, run=run, framework=framework, metric=metric)
            else:
                add(f"rlk_align_{name}", value, run=run)
        for finding in record.findings:
            add("rlk_align_finding", 1.0, run=run, name=finding.name, level=finding.level)
    lines = []
    for name, values in samples.items():
        lines += [f"# TYPE {name} gauge", *values]
    return "\n".join(lines) + "\n"


def _label(text: str) -> str:
    return printable(text).replace("\\", "\\\\").replace('"', '\\"')
