"""The drift chart: the distance of the two sides by operator, in execution order."""

import math
from collections.abc import Iterator, Sequence
from typing import Literal

from markupsafe import Markup

from rlk_align.report.drift import DriftAxis, DriftSeries
from rlk_align.report.html.figure import Figure
from rlk_align.report.html.svg import LogScale, chart, el, figure, text
from rlk_align.report.operator_facts import OperatorFacts

WIDTH, LEFT, RIGHT, TOP, HEIGHT = 1120.0, 58.0, 10.0, 60.0, 300.0


def drift_scale(series: Sequence[DriftSeries], height: float = HEIGHT) -> LogScale:
    """Returns a scale that fits all series."""
    values: list[float | None] = []
    for s in series:
        values.append(s.rounding)
        for o in s.operators:
            values += [o.mean, o.largest, o.introduced, o.inherited]
    return LogScale([v for v in values if v is not None], TOP, TOP + height)


def drift_figure(
    name: str,
    title: str,
    series: Sequence[DriftSeries],
    *,
    linked: bool,
    scale: LogScale | None = None,
) -> Figure:
    """Draws the series. `linked`: each site links to its row in the table of operators."""
    plot = _DriftPlot(series, scale or drift_scale(series), linked)
    probed = any(o.introduced is not None for s in series for o in s.operators)
    legend = []
    for n, s in plot.numbered:
        whose = f"{s.label}: " if len(series) > 1 else ""
        legend.append((f"line s{n}", f"{whose}mean over the rows that differ"))
        legend.append((f"thin s{n}", f"{whose}largest of a row"))
        if any(o.introduced is not None for o in s.operators):
            legend.append((f"diamond s{n}", f"{whose}introduced here"))
    if probed and len(series) == 1:
        legend.append(("ring s0", "inherited from its inputs"))
    if plot.budgets:
        legend.append(("budget", "what the contract lets an operator introduce by itself"))
    if plot.rounding is not None:
        legend.append(("rounding", f"one rounding of the dtype, {plot.rounding:.2g}"))
    legend += [("noisy", "an engine does not repeat itself here")] if plot.noisy else []
    desc = (
        "Operators in execution order from left to right; relative L2 error between the two sides "
        "upwards, on a logarithmic scale, with a lane for exact zeros at the bottom."
    )
    size = (WIDTH, plot.bottom)
    return Figure(
        name=name,
        title=title,
        caption=list(_caption(probed, plot.budgets, series)),
        svg=chart(name, size, title, desc, plot.draw()),
        legend=legend,
        columns=_COLUMNS if len(series) == 1 else ["run", *_COLUMNS],
        rows=[_row(s, o, len(series) > 1) for s in series for o in s.operators],
    )


def _caption(probed: bool, budgets: bool, series: Sequence[DriftSeries]) -> Iterator[str]:
    yield (
        "Relative L2 error of a row: the norm of the difference of the two sides, over the norm "
        "of the row. Errors add up along the model, so a rising line alone is not a fault. "
        "Log-probs have charts of their own, below."
    )
    if probed:
        yield (
            "Introduced: the difference that an operator adds although both engines get the same "
            "inputs. Inherited: the difference in its output that follows from different inputs."
        )
    else:
        yield "Not probed: rlk-align probe RUN separates introduced from inherited."
    if budgets:
        yield (
            "The band is the contract's rms budget of both sides together; it bounds what is "
            "introduced, not what adds up."
        )
    if len(series) == 1 and not any(o.site.noisy for o in series[0].operators):
        yield "Noise floor: no row drawn here is known to change when its engine runs again."


_COLUMNS = ["site", "rows", "differ", "mean", "largest", "introduced", "inherited", "allowed"]


def _row(series: DriftSeries, o: OperatorFacts, named: bool) -> list[str]:
    sizes = (o.mean, o.largest, o.introduced, o.inherited, series.allowed(o))
    cells = [o.site.site, f"{o.site.rows:,}", f"{o.site.differ:,}", *map(figure, sizes)]
    return [series.label, *cells] if named else cells


class _DriftPlot:
    """The drawing: sites along x, the scale along y."""

    def __init__(self, series: Sequence[DriftSeries], scale: LogScale, linked: bool) -> None:
        self.numbered, self.scale, self.linked = list(enumerate(series)), scale, linked
        self.axis = DriftAxis(series)
        self.sites, self.named = self.axis.sites, self.axis.named
        self.step = (WIDTH - LEFT - RIGHT) / max(1, len(self.sites))
        self.bottom = scale.bottom + LogScale.LANE + (84 if self.named else 14)
        first = series[0]
        self.budgets = any(first.allowed(o) for o in first.operators)
        self.rounding = first.rounding
        self.noisy = any(o.site.noisy for s in series for o in s.operators)

    def x(self, site: str) -> float:
        """The middle of a site's column."""
        return LEFT + (self.axis.at[site] + 0.5) * self.step

    def draw(self) -> Iterator[Markup]:
        """Draws the layers of the chart from back to front."""
        yield from self._layers()
        yield from self._axis()
        yield from self._bands()
        for number, series in self.numbered:
            yield from self._lines(number, series)
        for number, series in self.numbered:
            yield from self._parts(number, series)
        yield from self._marks()
        yield el("g", *self._hits(), data_roving="x")

    def _layers(self) -> Iterator[Markup]:
        bottom = self.scale.bottom + LogScale.LANE
        last = -math.inf
        for layer, first, count in self.axis.layers():
            x, width = LEFT + first * self.step, self.step * count
            if layer % 2 == 0:
                yield el("rect", x=x, y=TOP, width=width, height=bottom - TOP, class_="layer")
            if x - last >= 46:
                yield text(x + 3, TOP - 5, f"layer {layer}", class_="label")
                last = x

    def _axis(self) -> Iterator[Markup]:
        right, scale = WIDTH - RIGHT, self.scale
        for y, label in scale.decades():
            yield el("line", x1=LEFT, x2=right, y1=y, y2=y, class_="grid")
            yield text(LEFT - 6, y + 4, label, class_="label end")
        lane = {"y": scale.bottom, "height": LogScale.LANE, "class_": "zero"}
        yield el("rect", x=LEFT, width=right - LEFT, **lane)
        yield text(LEFT - 6, scale.zero + 4, "exact 0", class_="label end")
        yield text(2, 10, "relative L2 error, log scale", class_="label")
        if self.named:
            y = scale.bottom + LogScale.LANE + 8
            for s in self.sites:
                turn = f"rotate(-60 {self.x(s.site) + 3:.1f} {y:.1f})"
                yield text(self.x(s.site) + 3, y, s.op, class_="tick end", transform=turn)

    def _bands(self) -> Iterator[Markup]:
        series, scale, half = self.numbered[0][1], self.scale, self.step / 2
        for o in series.operators:
            x, allowed = self.x(o.site.site) - half, series.allowed(o)
            if allowed:
                y = scale(allowed)
                height = scale.bottom - y
                yield el("rect", x=x, y=y, width=self.step, height=height, class_="budget")
            if o.site.noisy:
                lane = {"y": scale.bottom, "height": LogScale.LANE}
                yield el("rect", x=x, width=self.step, class_="noisy", **lane)
        if self.rounding is not None:
            y = scale(self.rounding)
            yield el("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="rounding")

    def _lines(self, number: int, series: DriftSeries) -> Iterator[Markup]:
        kinds: tuple[Literal["largest", "mean"], ...] = ("largest", "mean")
        for kind in kinds:
            values = self.axis.values(series, kind)
            points = [(self.x(s.site), v) for s, v in zip(self.sites, values, strict=True)]
            path = " ".join(_strokes(points, self.scale))
            yield el("path", d=path, class_=f"{'thin' if kind == 'largest' else 'line'} s{number}")
        if self.named:
            for o in series.operators:
                if o.mean is not None:
                    y = self.scale(o.mean)
                    yield el("circle", cx=self.x(o.site.site), cy=y, r=2, class_=f"dot s{number}")

    def _parts(self, number: int, series: DriftSeries) -> Iterator[Markup]:
        """Draws introduced errors; in a chart of one run, inherited errors too."""
        size = min(5.0, max(2.0, self.step / 2))
        for o in series.operators:
            x = self.x(o.site.site)
            if o.inherited and len(self.numbered) == 1:
                y = self.scale(o.inherited)
                yield el("circle", cx=x, cy=y, r=size * 0.7, class_="ring s0")
            if o.introduced is not None:
                # The marks are side by side, so that no run hides another.
                x += (number - (len(self.numbered) - 1) / 2) * self.step / 2
                y, half = self.scale(o.introduced), size if o.introduced else size / 2
                path = f"M{x:.1f} {y - half:.1f}l{half} {half}l-{half} {half}l-{half} -{half}z"
                yield el("path", d=path, class_=f"diamond s{number}")

    def _marks(self) -> Iterator[Markup]:
        """Marks where drift starts and the first operator beyond its budget, in the first run that
        has each."""
        operators = [(s.label, o) for _, s in self.numbered for o in s.operators]
        marks = (
            ("first", "▼ drift starts: ", next((f for f in operators if f[1].introduces), None)),
            ("over", "✕ off: ", next((f for f in operators if f[1].over), None)),
        )
        for n, (kind, prefix, mark) in enumerate(marks):
            if mark is None:
                continue
            label, o = mark
            whose = f" ({label})" if len(self.numbered) > 1 else ""
            x, y = self.x(o.site.site), 26.0 + 14 * n
            yield el("line", x1=x, x2=x, y1=y + 3, y2=self.scale.bottom, class_=f"mark {kind}")
            side, shift = ("end", -4) if x > WIDTH * 0.6 else ("start", 4)
            words = f"{prefix}{o.site.site}{whose}"
            yield text(x + shift, y, words, class_=f"label {kind} {side}")

    def _hits(self) -> Iterator[Markup]:
        """Draws a column for each site, for a pointer and for the keyboard."""
        bottom = self.scale.bottom + LogScale.LANE
        by_site = {s: {o.site.site: o for o in series.operators} for s, series in self.numbered}
        for n, site in enumerate(self.sites):
            operators = [(series, by_site[s].get(site.site)) for s, series in self.numbered]
            several = len(operators) > 1
            summary = " | ".join(
                f"{series.label}: {o.summary}" if several else o.summary
                for series, o in operators
                if o is not None
            )
            x = LEFT + n * self.step
            area = el("rect", x=x, y=TOP, width=self.step, height=bottom - TOP)
            title = el("title", summary)
            if self.linked:
                link = {"href": f"#op-{n + 1}", "data_op": n + 1}
                yield el("a", title, area, class_="hit", aria_label=summary, **link)
            else:
                yield el("g", title, area, class_="hit", role="img", aria_label=summary)


def _strokes(points: list[tuple[float, float | None]], scale: LogScale) -> Iterator[str]:
    """Yields the commands of a path that is broken where a value is missing."""
    down = False
    for x, value in points:
        if value is not None:
            yield f"{'L' if down else 'M'}{x:.1f} {scale(value):.1f}"
        down = value is not None
