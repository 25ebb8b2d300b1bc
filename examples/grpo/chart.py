"""Draws reward and mismatch over the steps of runs.

pip install matplotlib
python examples/grpo/chart.py runs/grpo runs/off -o chart.svg
"""

import argparse
import sys
from pathlib import Path

from summary import lines

PANELS = (
    ("training reward, mean of 10 steps", lambda line: line["reward"]),
    ("largest |Δ log-prob|", lambda line: line["mismatch"]["max"]),
    ("share of tokens whose log-prob differs", lambda line: _share(line["mismatch"])),
)


def _share(mismatch: dict[str, float]) -> float:
    return mismatch["other_bits"] / max(mismatch["tokens"], 1)


def steps(run: Path) -> list[dict]:
    """The lines of a run's metrics. Raises ValueError if there are none, or if one is
    incomplete."""
    path = run / "metrics.jsonl"
    if not (metrics := lines(path)):
        raise ValueError(f"{path} has no steps; name the folder of a run of train.py")
    return metrics


STYLES = {
    "rlk": {"color": "tab:blue", "linestyle": "-", "label": "with the kernels"},
    "off": {"color": "tab:orange", "linestyle": "--", "label": "without"},
}
SMOOTHED_OVER = 10
"""Steps of the moving mean, which only the training reward has."""


def smoothed(values: list[float]) -> list[float]:
    """The mean of each value and up to SMOOTHED_OVER - 1 values before it."""
    parts = (values[max(0, i + 1 - SMOOTHED_OVER) : i + 1] for i in range(len(values)))
    return [sum(part) / len(part) for part in parts]


def draw(runs: list[Path], output: Path) -> None:
    """Draws the panels one above the other, with a line for each run."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1 + len(PANELS), sharex=True, figsize=(7, 10))
    for run in runs:
        trained, held_out = steps(run), lines(run / "held_out.jsonl")
        style = STYLES[trained[-1]["kernels"]] | {"alpha": 0.8, "linewidth": 1}
        rewards = [x["reward"] for x in held_out]
        axes[0].plot([x["step"] for x in held_out], rewards, marker="o", **style)
        for axis, (_, value) in zip(axes[1:], PANELS, strict=True):
            values = [value(x) for x in trained]
            values = smoothed(values) if axis is axes[1] else values
            axis.plot([x["step"] for x in trained], values, **style)
    titles = ("held-out reward", *(title for title, _ in PANELS))
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, loc="left", fontsize=10)
        axis.grid(alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    one_of_each = dict(zip(labels, handles, strict=True))
    axes[0].legend(one_of_each.values(), one_of_each.keys(), fontsize=8)
    axes[-1].set_xlabel("step")
    figure.tight_layout()
    figure.savefig(output)


def main() -> int:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    a.add_argument("runs", type=Path, nargs="+")
    a.add_argument("-o", "--output", type=Path, default=Path("chart.svg"))
    options = a.parse_args()
    try:
        draw(options.runs, options.output)
    except (ValueError, ImportError) as error:
        hint = ": pip install matplotlib" if isinstance(error, ImportError) else ""
        print(f"error: {error}{hint}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
