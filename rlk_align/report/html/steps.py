"""The page of a monitored run: its metrics over the steps, and what was found."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from rlk_align.monitor.record import Interval, StepRecord
from rlk_align.report.html.figure import Figure
from rlk_align.report.html.page import render
from rlk_align.report.html.svg import chart, el, figure, text

_WIDTH, _LEFT, _RIGHT, _TOP, _HEIGHT = 1120.0, 74.0, 10.0, 22.0, 130.0
Value = Callable[[StepRecord], Interval | float | int | None]


@dataclass(frozen=True, slots=True)
class Series:
    """What one chart shows."""

    name: str
    title: str
    caption: str
    value: Value


SERIES = (
    Series(
        "ratio-error",
        "E[ρ] − 1",
        "0 whatever the numerics are, if the rollout's log-probs are of the law that was sampled. "
        "The band is the interval, clustered by sequence.",
        lambda r: r.ratio_error,
    ),
    Series("noise", "c, mean |Δ| / mean (1 − p)", "Of both sides, in nats.", lambda r: r.c),
    Series("k3", "k3, KL", "In nats; it should not grow with the steps.", lambda r: r.k3),
    Series(
        "k2-scaled",
        "k2, scaled by (1 − p)²",
        "It rises when weights are not synced, and not when the entropy changes.",
        lambda r: r.k2_scaled,
    ),
    Series("mean-dlogp", "mean |Δ|", "In nats.", lambda r: r.mean_abs),
    Series("ess", "effective sample size / N", "Of the tokens' ratios.", lambda r: r.ess),
    Series(
        "clip",
        "share of ρ outside [0.8, 1.2]",
        "Of the compared tokens.",
        lambda r: r.clip_fraction,
    ),
    Series("kl-entropy", "k3 / entropy", "Of the trainer's entropy.", lambda r: r.kl_entropy),
    Series(
        "outliers",
        "share of outlier sequences",
        "Their noise is more than ten times the median sequence's.",
        lambda r: r.outliers,
    ),
    Series(
        "lag", "version lag", "The trainer's weights over the rollout's.", lambda r: r.version_lag
    ),
    Series("reward", "reward", "The mean of the sequences.", lambda r: r.reward),
)


@dataclass(frozen=True, kw_only=True)
class RunSteps:
    """One run of the page."""

    name: str
    status: str
    figures: list[Figure]
    findings: list[list[str]]


def steps_page(runs: Mapping[str, Sequence[StepRecord]]) -> str:
    """Returns the page of one run, or of several one below the other."""
    views = [_view(n, name, records) for n, (name, records) in enumerate(runs.items())]
    return render("steps.html", runs=views)


def _view(number: int, name: str, records: Sequence[StepRecord]) -> RunSteps:
    levels = {f.level for r in records for f in r.findings}
    order = (("inconclusive", "inconclusive"), ("fail", "fail"))
    status = next((words for level, words in order if level in levels), "pass")
    figures = [f for s in SERIES if (f := steps_figure(f"r{number}-{s.name}", s, records))]
    rows = [
        [
            str(r.step),
            f.level,
            f.name,
            figure(f.value),
            figure(f.limit),
            "–" if f.since is None else str(f.since),
            f.why,
        ]
        for r in records
        for f in r.findings
    ]
    return RunSteps(
        name=name,
        status=status if records else "inconclusive",
        figures=figures,
        findings=rows,
    )


def steps_figure(name: str, series: Series, records: Sequence[StepRecord]) -> Figure | None:
    """Returns a chart of one metric over the steps; None where no step has it."""
    points = [(r, v) for r in records if (v := _interval(series.value(r))) is not None]
    if not points:
        return None
    plot = _Plot(points)
    bad = sum(not math.isfinite(v.value) for _, v in points)
    caption = [series.caption]
    if bad:
        caption.append(f"{bad:,} steps have a value that is NaN or infinite: see the table.")
    return Figure(
        name=name,
        title=series.title,
        caption=caption,
        svg=chart(
            name,
            (_WIDTH, _TOP + _HEIGHT + 24),
            series.title,
            f"{series.title} upwards, the training step to the right.",
            plot.draw(),
        ),
        legend=[
            ("line s0", "each step"),
            ("noisy", "its interval"),
            ("limit", "a step that fails"),
        ],
        columns=["step", "value", "low", "high"],
        rows=[[str(r.step), figure(v.value), figure(v.low), figure(v.high)] for r, v in points],
    )


def _interval(value: Interval | float | int | None) -> Interval | None:
    if value is None or isinstance(value, Interval):
        return value
    return Interval(value=float(value), low=float(value), high=float(value))


class _Plot:
    def __init__(self, points: list[tuple[StepRecord, Interval]]) -> None:
        self.points = [(r, v) for r, v in points if math.isfinite(v.value)]
        self.all = points
        values = [v.value for _, v in self.points] or [0.0]
        low, high = min(values), max(values)
        room = (high - low) or abs(high) or 1.0
        self.low, self.high = low - 0.15 * room, high + 0.15 * room
        self.first, self.last = points[0][0].step, points[-1][0].step

    def x(self, step: int) -> float:
        span = (self.last - self.first) or 1
        return _LEFT + (step - self.first) / span * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return _TOP + _HEIGHT * (1 - min(max(share, 0.0), 1.0))

    def draw(self) -> Iterator[Markup]:
        bottom = _TOP + _HEIGHT
        for value in (self.low, (self.low + self.high) / 2, self.high):
            y = self.y(value)
            yield el("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y, class_="grid")
            yield text(_LEFT - 6, y + 4, f"{value:.3g}", class_="label end")
        for record, _ in self.all:
            if any(f.level != "warn" for f in record.findings):
                x = self.x(record.step)
                yield el("line", x1=x, x2=x, y1=_TOP, y2=bottom, class_="limit")
        if len(self.points) > 1:
            yield el("path", class_="noisy", d=self._band())
            yield el("path", class_="line s0", d="M" + "L".join(self._line()))
        else:
            for record, v in self.points:
                yield el("circle", cx=self.x(record.step), cy=self.y(v.value), r=4, class_="dot s0")
        for step in sorted({self.first, (self.first + self.last) // 2, self.last}):
            yield text(self.x(step), bottom + 18, f"{step:,}", class_="label middle")

    def _line(self) -> list[str]:
        return [f"{self.x(r.step):.1f} {self.y(v.value):.1f}" for r, v in self.points]

    def _band(self) -> str:
        up = [f"{self.x(r.step):.1f} {self.y(_finite(v.high, v)):.1f}" for r, v in self.points]
        down = [f"{self.x(r.step):.1f} {self.y(_finite(v.low, v)):.1f}" for r, v in self.points]
        return "M" + "L".join([*up, *reversed(down)]) + "Z"


def _finite(bound: float, interval: Interval) -> float:
    return bound if math.isfinite(bound) else interval.value
