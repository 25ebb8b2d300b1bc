"""What runs of the loop have shown, with the kernels and without, as tables in Markdown.

python examples/grpo/summary.py runs/six/*/
"""

import json
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

Line = dict[str, Any]
STAGES = (
    *("rollout", "batch", "score", "update", "wake", "sync", "digest", "write", "compare"), "step"
)  # fmt: skip


def lines(path: Path) -> list[Line]:
    """Of a file of JSON lines; none where it is not there. Raises ValueError where one is cut."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}: line {number} is not whole; train.py --resume writes it again"
            ) from error
    return found


def spread(values: Iterable[float], digits: int = 3) -> str:
    """The mean, with the smallest and the largest."""
    found = list(values)
    if not found:
        return "–"
    low, high = (f"{x:.{digits}f}" for x in (min(found), max(found)))
    return f"{statistics.fmean(found):.{digits}f} ({low} to {high})"


def _held_out(runs: list[list[Line]], place: Callable[[int], int], key: str) -> str:
    return spread(run[place(len(run))][key] for run in runs if run)


def _row(kernels: str, runs: dict[Path, list[Line]]) -> list[str]:
    """Of the runs of one arm."""
    steps = [line for run in runs.values() for line in run]
    drift = [line["mismatch"] for line in steps]
    tokens, other = (sum(d[key] for d in drift) for key in ("tokens", "other_bits"))
    held = [lines(path / "held_out.jsonl") for path in runs]
    at = (lambda n: 0, lambda n: n // 2, lambda n: n - 1)
    return [
        kernels, str(len(runs)), " ".join(str(len(run)) for run in runs.values()),
        *(_held_out(held, place, "reward") for place in at),
        f"{other:,} of {tokens:,}", f"{statistics.fmean(d['k3'] for d in drift):.1e}",
        *(f"{np.max([d[key] for d in drift]):.3f}" for key in ("max", "ratio_max")),
        str(sum(d["other_bits"] == 0 for d in drift)) + f" of {len(drift)}",
        spread(100 * line["clip_fraction"] for line in steps if "clip_fraction" in line),
    ]  # fmt: skip


def _seconds(kernels: str, runs: dict[Path, list[Line]]) -> list[str]:
    """Medians, past the first five steps of each run."""
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
    """Tables of reward and mismatch, and of seconds and memory, an arm a row; and which runs have
    no step. Raises ValueError where a line is cut."""
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
