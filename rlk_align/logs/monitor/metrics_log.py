"""A framework's log of metrics under its own names, with a JSON object on each line."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlk_align.errors import DumpError
from rlk_align.logs.monitor.growing_file import GrowingFile
from rlk_align.logs.monitor.record import Interval, StepRecord
from rlk_align.logs.monitor.run_monitor import RunMonitor

FIELDS = {
    "ratio": ("sampling_importance_ratio", "behave_imp_weight/avg", "tis"),
    "k1": (
        *("rollout_corr/kl", "rollout_correction/kl", "vllm_kl", "mis_kl"),
        "kl_sample_train_v1",
    ),
    "k2": ("kl_sample_train_v2",),
    "k3": (
        *("gen_kl_error", "mismatch_kl/all/mean", "mismatch_kl/mean", "rollout_corr/k3_kl"),
        *("rollout_correction/k3_kl", "train_rollout_kl", "mis_k3_kl", "rollout_train_k3_kl/avg"),
    ),
    "mean_abs": (
        *("train_rollout_logprob_abs_diff", "sampling_logp_difference/mean"),
        *("rollout_train_logprobs_abs_diff_mean", "rollout_train_logp_abs_diff/avg"),
    ),
    "kl_entropy": ("kl_ent_ratio/mean",),
    "reward": ("reward", "reward/mean", "critic/score/mean", "rollout/raw_reward"),
}
"""Field of a record -> the names of its metric. TRL's ratio is omitted, because TRL clips it before
averaging."""
STEPS = ("step", "_step", "global_step", "training/global_step", "train/step", "rollout/step")


class MetricsLog:
    """A file to which a framework appends the metrics of each step, on consecutive lines."""

    def __init__(self, path: Path) -> None:
        self.name, self._file = str(path), GrowingFile(path)
        self._step: int | None = None
        self._metrics: dict[str, float] = {}
        self._known = False

    def poll(self, monitor: RunMonitor, ended: bool) -> Iterator[StepRecord]:
        """Yields the records of complete steps: those before a later step. Raises DumpError."""
        for where, line in self._file.lines(ended):
            try:
                record = json.loads(line)
                metrics = flat(record) if isinstance(record, dict) else {}
            except (ValueError, RecursionError) as error:
                raise DumpError(
                    f"{where}: not JSON", "a log has one JSON object per line"
                ) from error
            step = next(
                (int(metrics[s]) for s in STEPS if math.isfinite(metrics.get(s, math.nan))), None
            )
            if step is None:
                raise DumpError(f"{where}: no step is given", f"write one of {', '.join(STEPS)}")
            if step != self._step:
                yield from self._finished(monitor)
            self._step = step
            self._metrics |= metrics
        if ended:
            yield from self._finished(monitor)
            if not self._known:
                raise DumpError(
                    f"{self.name} has no metric of the two sides' log-probs",
                    "known are, for instance, gen_kl_error, mismatch_kl/all/mean, rollout_corr/kl "
                    "and train_rollout_logprob_abs_diff",
                )

    def _finished(self, monitor: RunMonitor) -> Iterator[StepRecord]:
        metrics, self._metrics = self._metrics, {}
        if self._step is None or not metrics:
            return
        known = {f: v for f, names in FIELDS.items() if (v := find(metrics, names)) is not None}
        if not known.keys() - {"reward"}:
            return  # the metrics of a validation, for example
        self._known = True
        ratio, k3 = known.get("ratio"), known.get("k3")
        yield monitor.record(
            StepRecord(
                step=self._step,
                ratio_error=None if ratio is None else Interval.exactly(ratio - 1),
                k3=None if k3 is None else Interval.exactly(k3),
                k1=known.get("k1"),
                k2=known.get("k2"),
                mean_abs=known.get("mean_abs"),
                kl_entropy=known.get("kl_entropy"),
                reward=known.get("reward"),
            )
        )


def flat(record: dict[str, Any]) -> dict[str, float]:
    """Returns the numbers of a line. A number in a nested object is named `outer/inner`, except in
    the object `data` of verl's log."""
    numbers: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            prefix = "" if name == "data" else f"{name}/"
            numbers |= {prefix + key: number for key, number in flat(value).items()}
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[name] = float(value)
    return numbers


def find(metrics: dict[str, float], names: tuple[str, ...]) -> float | None:
    """Returns the first of these metrics that exists, under its name or with a prefix."""
    for name in names:
        for key, value in metrics.items():
            if key == name or key.endswith(f"/{name}"):
                return value
    return None
