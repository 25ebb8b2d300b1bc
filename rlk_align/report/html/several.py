"""Several runs on one page: engines, dtypes, kernels on and off, side by side."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from markupsafe import Markup

from rlk_align.judge.verdict import headline, over_budget
from rlk_align.report.document import Document
from rlk_align.report.drift import drift_series
from rlk_align.report.html.drift import drift_figure, drift_scale
from rlk_align.report.html.figure import Figure
from rlk_align.report.html.logprobs import WORDS, largest_bound, metric_value
from rlk_align.report.html.page import render
from rlk_align.report.html.provenance import engine_facts, side_by_side
from rlk_align.report.html.svg import LogScale, chart, el, figure, text
from rlk_align.report.source import ReportSource
from rlk_align.report.verdict import source_document
from rlk_align.report.words import engine_spec
from rlk_align.results import EdgeName, EdgeResult

_SMALL = 150.0
"""Height of a drift chart among several."""


@dataclass(frozen=True, kw_only=True)
class RunView:
    """One of the runs that a page compares."""

    label: str
    """A letter and its folder's name."""
    source: ReportSource
    document: Document
    cells: list[str]
    """The run's cells in the table of verdicts, from the engines on."""


@dataclass(frozen=True, kw_only=True)
class EdgeView:
    """One edge of all runs that have it."""

    name: str
    drift: list[Figure]
    logprobs: Figure
    columns: list[str]
    rows: list[list[str]]


def several_page(sources: list[ReportSource]) -> str:
    """Returns the page that compares the runs."""
    names = Counter(s.name for s in sources)
    runs = [
        _run(f"{_letter(n)} {s.name if names[s.name] == 1 else s.folder}", s)
        for n, s in enumerate(sources)
    ]
    edges = dict.fromkeys(e.name for s in sources for e in s.verdict.comparison.edges)
    order = sorted(edges, key=lambda name: name != "prefill_vs_train")
    return render(
        "several.html",
        runs=runs,
        columns=_COLUMNS,
        views=[view for name in order if (view := _view(name, runs)) is not None],
        provenance=side_by_side([_engine_facts(run) for run in runs]),
    )


def _letter(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else str(number + 1)


_COLUMNS = [
    *("rollout", "train", "dtype", "contract", "edge", "max |Δ|", "mean |Δ|", "k3"),
    *("first difference", "beyond budget"),
]


def _run(label: str, source: ReportSource) -> RunView:
    verdict, c = source.verdict, source.verdict.comparison
    engines = [engine_spec(c.engines[side]) for side in ("rollout", "train")]
    contract = f"{verdict.contract.id} {verdict.contract.version}"
    edge = None if c.stopped else headline(verdict)
    figures = ["–"] * 6
    if edge is not None:
        m, first, over = edge.metrics, edge.first_bitwise, over_budget(verdict, edge)
        sizes = map(figure, (m.max_abs_dlogp, m.mean_abs_dlogp, m.k3))
        off = f"{over[0].unit.site} ({over[0].side or 'side not known'})" if over else "none"
        figures = [edge.name, *sizes, first.site if first else "none", off]
    return RunView(
        label=label,
        source=source,
        document=source_document(source),
        cells=[*engines, c.dtype, contract, *figures],
    )


def _view(name: EdgeName, runs: list[RunView]) -> EdgeView | None:
    """The edge in all runs that have it; None where no run does."""
    measured = [(run, edge) for run in runs if (edge := _edge(run, name)) is not None]
    if not measured:
        return None
    series = [drift_series(r.source, e, r.label) for r, e in measured]
    title = f"Drift of {name}"
    if len(series) <= 2:
        drift = [drift_figure(f"drift-{name}", title, series, linked=False)]
    else:
        scale = drift_scale(series, _SMALL)
        drift = [
            drift_figure(f"drift-{name}-{n}", f"{title}: {s.label}", [s], linked=False, scale=scale)
            for n, s in enumerate(series)
        ]
        # What is said of the first holds for all.
        drift = [drift[0], *(replace(f, caption=[], legend=[]) for f in drift[1:])]
    rows = [
        [words, *(metric_value(edge.metrics, metric) for _, edge in measured)]
        for metric, words in WORDS.items()
    ]
    return EdgeView(
        name=name,
        drift=drift,
        logprobs=_sizes(name, measured),
        columns=["figure", *(run.label for run, _ in measured)],
        rows=rows,
    )


def _edge(run: RunView, name: EdgeName) -> EdgeResult | None:
    c = run.source.verdict.comparison
    return None if c.stopped else next((e for e in c.edges if e.name == name), None)


_WIDTH, _LEFT, _TOP, _ROW = 1120.0, 190.0, 26.0, 26.0
_SIZES = (
    ("mean_abs_dlogp", "mean |Δ|", "ring"),
    ("p99_abs_dlogp", "p99 |Δ|", "diamond"),
    ("max_abs_dlogp", "max |Δ|", "dot"),
)


def _sizes(name: EdgeName, measured: list[tuple[RunView, EdgeResult]]) -> Figure:
    """Mean, p99 and largest |Δlogp| of each run, on one scale."""
    bounds = [largest_bound(run.source.verdict, edge) for run, edge in measured]
    values = [getattr(edge.metrics, metric) for _, edge in measured for metric, _, _ in _SIZES]
    scale = LogScale([*values, *(b for b in bounds if b)], _LEFT + 60, _WIDTH - 10)
    bottom = _TOP + _ROW * len(measured)
    title = f"|Δlogp| of {name}"
    desc = "A row for each run; mean, p99 and largest |Δlogp| to the right, by logarithm."
    drawn = [*_axis(scale, bottom)]
    for n, ((run, edge), bound) in enumerate(zip(measured, bounds, strict=True)):
        drawn += _row(run, edge, bound, scale, _TOP + (n + 0.5) * _ROW)
    return Figure(
        name=f"sizes-{name}",
        title=title,
        caption=["In nats, over the sampled tokens. A bar marks the bound on max |Δ|."],
        svg=chart(f"sizes-{name}", (_WIDTH, bottom + 8), title, desc, drawn),
        legend=[
            *((f"{kind} s0" if kind == "dot" else kind, words) for _, words, kind in _SIZES),
            ("limit", "the contract's bound on max |Δ|"),
        ],
        columns=["run", *(words for _, words, _ in _SIZES)],
        rows=[
            [run.label, *(figure(getattr(edge.metrics, metric)) for metric, _, _ in _SIZES)]
            for run, edge in measured
        ],
    )


def _across(scale: LogScale, value: float) -> float:
    """LogScale counts from its bottom upwards: turned to the right; an exact 0 at the far left."""
    if value == 0:
        return _LEFT + 20
    if not math.isfinite(value):
        return _WIDTH - 4
    return scale.top + scale.bottom - scale(value)


def _axis(scale: LogScale, bottom: float) -> Iterator[Markup]:
    yield text(_LEFT + 20, _TOP - 8, "exact 0", class_="label middle")
    yield el("rect", x=_LEFT, y=_TOP, width=40.0, height=bottom - _TOP, class_="zero")
    for y, label in scale.decades():
        x = scale.top + scale.bottom - y
        yield el("line", x1=x, x2=x, y1=_TOP, y2=bottom, class_="grid")
        yield text(x, _TOP - 8, label, class_="label middle")


def _row(
    run: RunView, edge: EdgeResult, bound: float | None, scale: LogScale, y: float
) -> Iterator[Markup]:
    yield text(_LEFT - 8, y + 4, run.label[:28], class_="label end")
    if bound:
        x = _across(scale, bound)
        yield el("line", x1=x, x2=x, y1=y - 9, y2=y + 9, class_="limit")
    for metric, words, kind in _SIZES:
        value = getattr(edge.metrics, metric)
        x, title = _across(scale, value), el("title", f"{run.label}: {words} {figure(value)}")
        if kind == "diamond":
            path = f"M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z"
            yield el("path", title, d=path, class_=kind)
        else:
            yield el("circle", title, cx=x, cy=y, r=4, class_=f"{kind} s0")


def _engine_facts(run: RunView) -> dict[str, str]:
    """What both of a run's engines say of themselves, by side and name."""
    return {
        f"{side} {name}": value
        for side, engine in run.source.verdict.comparison.engines.items()
        for name, value in engine_facts(engine).items()
    }
