"""Reward and mismatch over the steps of runs, as a picture.

pip install matplotlib
python examples/grpo/chart.py runs/grpo runs/off -o chart.svg
"""

import argparse
import json
import sys
from pathlib import Path

PANELS = (
    ("mean reward", lambda line: line["reward"]),
    ("largest |Δ log-prob|", lambda line: line["mismatch"]["max"]),
    ("share of tokens with other bits", lambda line: _share(line["mismatch"])),
)


def _share(mismatch: dict[str, float]) -> float:
    return mismatch["other_bits"] / max(mismatch["tokens"], 1)


def steps(run: Path) -> list[dict]:
    """The lines of a run's metrics. Raises ValueError where there are none."""
    path = run / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    if not lines:
        raise ValueError(f"{path} has no steps; name the folder of a run of train.py")
    return [json.loads(line) for line in lines]


def draw(runs: list[Path], output: Path) -> None:
    """One panel above the other, a line for each run."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(PANELS), sharex=True, figsize=(7, 8))
    for run in runs:
        lines = steps(run)
        for axis, (_, value) in zip(axes, PANELS, strict=True):
            label = f"{run.name} (kernels {lines[-1]['kernels']})"
            axis.plot([x["step"] for x in lines], [value(x) for x in lines], label=label)
    for axis, (title, _) in zip(axes, PANELS, strict=True):
        axis.set_title(title, loc="left", fontsize=10)
        axis.grid(alpha=0.3)
    axes[0].legend()
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
