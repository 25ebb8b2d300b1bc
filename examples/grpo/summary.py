"""Summarises runs of the loop, with the kernels and without, as tables in Markdown.

python examples/grpo/summary.py runs/six/*/
"""

import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

Line = dict[str, Any]
STAGES = (
    *("rollout", "batch", "score", "update", "wake", "sync", "digest", "write", "compare"), "step"
)  # fmt: skip


def lines(path: Path) -> list[Line]:
    """The objects in a file of JSON lines; none if there is no file. Raises ValueError if a line is
    incomplete."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    objects = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            objects.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}: line {number} is incomplete; train.py --resume writes it again"
            ) from error
    return objects


def spread(values: Iterable[float], digits: int = 3) -> str:
    """The mean, with the smallest and the largest value."""
    numbers = list(values)
    if not numbers:
        return "–"
    low, high = (f"{x:.{digits}f}" for x in (min(numbers), max(numbers)))
    return f"{statistics.fmean(numbers):.{digits}f} ({low} to {high})"


def _row(kernels: str, runs: dict[Path, list[Line]]) -> list[str]:
    """The row of one arm's runs."""
    steps = [line for run in runs.values() for line in run]
    drift = [line["mismatch"] for line in steps]
    tokens, other = (sum(d[key] for d in drift) for key in ("tokens", "other_bits"))
    held_out = [run for path in runs if (run := lines(path / "held_out.jsonl"))]
    evaluated = (
        [run[0] for run in held_out],
        [run[len(run) // 2] for run in held_out],
        [run[-1] for run in held_out],
    )
    return [
        kernels, str(len(runs)), " ".join(str(len(run)) for run in runs.values()),
        *(spread(line["reward"] for line in some) for some in evaluated),
        f"{other:,} of {tokens:,}", f"{statistics.fmean(d['k3'] for d in drift):.1e}",
        *(f"{np.max([d[key] for d in drift]):.3f}" for key in ("max", "ratio_max")),
        str(sum(d["other_bits"] == 0 for d in drift)) + f" of {len(drift)}",
        spread(100 * line["clip_fraction"] for line in steps if "clip_fraction" in line),
    ]  # fmt: skip


def _seconds(kernels: str, runs: dict[Path, list[Line]]) -> list[str]:
    """The row of an arm's seconds and memory: medians past the first five steps of each run."""
    steps = [line for run in runs.values() for line in (run[5:] or run)]
    medians = [statistics.median(line["seconds"].get(s, 0.0) for line in steps) for s in STAGES]
    tokens = statistics.fmean(line["mismatch"]["tokens"] for line in steps)
    peak, reserved = (
        max(line.get(key) or 0 for line in steps) / 2**30
        for key in ("peak_memory_bytes", "reserved_memory_bytes")
    )
    length = statistics.fmean(line["length"] for line in steps)
    return [
        kernels, *(f"{x:.3f}" for x in medians), f"{3600 / medians[-1]:,.0f}", f"{tokens:,.0f}",
        f"{length:.1f}", f"{peak:.1f}", f"{reserved:.1f}",
    ]  # fmt: skip


def table(head: list[str], rows: list[list[str]]) -> str:
    cells = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def summary(runs: Iterable[Path]) -> str:
    """A table of reward and mismatch, and one of seconds and memory, with a row for each arm; and
    the runs without a step. Raises ValueError if a line is incomplete."""
    arms: dict[str, dict[Path, list[Line]]] = {}
    without = []
    for path in runs:
        if steps := lines(path / "metrics.jsonl"):
            arms.setdefault(steps[0]["kernels"], {})[path] = steps
        else:
            without.append(f"no step was taken in {path}")
    reward = [
        "kernels", "runs", "steps", "held-out reward before", "in the middle", "after",
        "tokens with other bits", "mean k3", "largest abs Δ", "largest ratio", "steps without any",
        "clipped before the first update, %",
    ]  # fmt: skip
    seconds = ["kernels", *(f"{s}, s" for s in STAGES), "steps an hour", "sampled tokens a step",
               "tokens an answer", "peak GiB", "reserved GiB"]  # fmt: skip
    tables = [
        table(head, [row(kernels, some) for kernels, some in arms.items()])
        for head, row in ((reward, _row), (seconds, _seconds))
        if arms
    ]
    return "\n\n".join((*tables, *without))


if __name__ == "__main__":
    try:
        print(summary(map(Path, sys.argv[1:])))
    except ValueError as error:
        sys.exit(f"error: {error}")
