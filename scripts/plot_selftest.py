"""Draws the curves of a self-test: which strength of each fault is named, by engine.

pip install matplotlib
rlk-align selftest --output json=selftest.json
python scripts/plot_selftest.py selftest.json selftest.svg
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from rlk_align.selftest.record import Detection, SelfTest

COLOURS = {"hf": "#d08c00", "vllm": "#1f6fb4", "megatron": "#3a8f3a"}
APART = 0.22
"""Between the engines' lines of one fault, in rows."""


def engine(d: Detection) -> str:
    """The name of the one with the fault."""
    return (d.rollout if d.side == "rollout" else d.train).partition(":")[0]


def by_strength(detections: list[Detection]) -> dict[float, bool]:
    """Strength -> whether every pair that it was seen in names it."""
    strengths = sorted({d.strength for d in detections})
    return {s: all(d.seen == "named" for d in detections if d.strength == s) for s in strengths}


def draw(found: SelfTest, axes: Axes) -> None:
    """A row for each fault, weakest strength on the left; filled where it is named."""
    curved = {d.fault for d in found.detections if d.curve}
    faults = list(dict.fromkeys(d.fault for d in found.detections if d.fault in curved))
    labels = []
    for row, fault in enumerate(faults):
        of = [d for d in found.detections if d.fault == fault]
        labels.append(f"{fault}\n{of[0].unit}")
        for number, (name, colour) in enumerate(COLOURS.items()):
            points = by_strength([d for d in of if engine(d) == name])
            height = row + (number - 1) * APART
            axes.plot(list(points), [height] * len(points), color=colour, linewidth=0.8)
            for face, is_named in ((colour, True), ("white", False)):
                some = [strength for strength, named in points.items() if named == is_named]
                axes.plot(some, [height] * len(some), "o", ms=5, color=colour, mfc=face)
    axes.set_xscale("log")
    axes.set_yticks(range(len(faults)), labels, fontsize=7)
    axes.set_ylim(len(faults) - 0.5, -0.5)
    axes.set_xlabel("strength of the fault, in the unit under its name")
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def legend() -> list[Line2D]:
    """One entry an engine, and what the marks mean."""
    lines = [
        Line2D([], [], color=c, marker="o", markersize=5, label=f"fault in {name}")
        for name, c in COLOURS.items()
    ]
    for face, what in (("#555555", "named exactly, with its side"), ("white", "not named")):
        mark = Line2D([], [], color="#555555", marker="o", linestyle="", markerfacecolor=face)
        mark.set_label(what)
        lines.append(mark)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("selftest", type=Path, help="JSON of `rlk-align selftest`")
    parser.add_argument("figure", type=Path, help="SVG to write")
    args = parser.parse_args()
    found = SelfTest.model_validate_json(args.selftest.read_text(encoding="utf-8"))
    # The same file each time, and text as text.
    plt.rcParams |= {"svg.hashsalt": "selftest", "svg.fonttype": "none"}
    faults = len({d.fault for d in found.detections if d.curve})
    figure, axes = plt.subplots(figsize=(9, 1 + 0.42 * faults), layout="constrained")
    draw(found, axes)
    figure.legend(handles=legend(), loc="outside upper center", ncols=5, fontsize=7, frameon=False)
    figure.savefig(args.figure, metadata={"Date": None})


if __name__ == "__main__":
    main()
