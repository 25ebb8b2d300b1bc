"""A chart of one metric over the steps of a run."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from rlk_align.logs.monitor.record import Interval, StepRecord
from rlk_align.report.html.figure import Figure
from rlk_align.report.html.svg import chart, el, figure, round_ticks, text

_WIDTH, _LEFT, _RIGHT, _TOP, _HEIGHT = 560.0, 70.0, 12.0, 10.0, 140.0
Value = Callable[[StepRecord], Interval | float | int | None]


@dataclass(frozen=True, slots=True)
class Series:
    """The metric of one chart."""

    name: str
    title: str
    caption: str
    value: Value


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
            (_WIDTH, _TOP + _HEIGHT + 26),
            series.title,
            f"{series.title} upwards, the training step to the right.",
            plot.draw(),
        ),
        legend=[
            ("line s0", "each step"),
            ("noisy", "its interval"),
            ("failing", "steps that fail"),
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
        room = 0.15 * (high - low) or 0.5 * abs(high) or 1.0
        # The axis of a metric without negative values starts at 0 or above.
        self.low, self.high = (low - room if low < 0 else max(0.0, low - room)), high + room
        self.first, self.last = points[0][0].step, points[-1][0].step

    def x(self, step: float) -> float:
        """Returns the position of a step; there is room for half a step on both sides."""
        share = (step - self.first + 0.5) / (self.last - self.first + 1)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return _TOP + _HEIGHT * (1 - min(max(share, 0.0), 1.0))

    def draw(self) -> Iterator[Markup]:
        bottom = _TOP + _HEIGHT
        for value, label in round_ticks(self.low, self.high, 5):
            y = self.y(value)
            yield el("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y, class_="grid")
            yield text(_LEFT - 6, y + 5, label, class_="label end")
        for first, last in self._failing():
            left, right = self.x(first - 0.5), self.x(last + 0.5)
            box = {"x": left, "y": _TOP, "width": right - left, "height": _HEIGHT}
            yield el("rect", class_="failing", **box)
        if len(self.points) > 1:
            yield el("path", class_="noisy", d=self._band())
            yield el("path", class_="line s0", d="M" + "L".join(self._line()))
        else:
            for record, v in self.points:
                yield el("circle", cx=self.x(record.step), cy=self.y(v.value), r=4, class_="dot s0")
        yield el("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=bottom, y2=bottom, class_="axis")
        for step in self._steps():
            yield text(self.x(step), bottom + 19, f"{step:,}", class_="label middle")

    def _steps(self) -> list[int]:
        """Returns the steps that the axis names."""
        if self.last == self.first:
            return [self.first]
        ticks = round_ticks(self.first, self.last, 8)
        return [round(step) for step, _ in ticks if step == round(step)]

    def _failing(self) -> Iterator[tuple[int, int]]:
        """Yields the first and the last step of each stretch of failed or inconclusive steps."""
        start = end = None
        for record, _ in self.all:
            if all(f.level == "warn" for f in record.findings):
                if start is not None and end is not None:
                    yield start, end
                start = None
                continue
            start, end = record.step if start is None else start, record.step
        if start is not None and end is not None:
            yield start, end

    def _line(self) -> list[str]:
        return [f"{self.x(r.step):.1f} {self.y(v.value):.1f}" for r, v in self.points]

    def _band(self) -> str:
        up = [f"{self.x(r.step):.1f} {self.y(_finite(v.high, v)):.1f}" for r, v in self.points]
        down = [f"{self.x(r.step):.1f} {self.y(_finite(v.low, v)):.1f}" for r, v in self.points]
        return "M" + "L".join([*up, *reversed(down)]) + "Z"


def _finite(bound: float, interval: Interval) -> float:
    return bound if math.isfinite(bound) else interval.value
