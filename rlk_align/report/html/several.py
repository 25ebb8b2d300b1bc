"""The page that compares several runs: engines, dtypes, kernels on and off."""

from collections import Counter
from dataclasses import dataclass, replace

from rlk_align.judge.verdict import headline, over_budget
from rlk_align.report.document import Document
from rlk_align.report.drift import drift_series
from rlk_align.report.html.drift import drift_figure, drift_scale
from rlk_align.report.html.figure import Figure
from rlk_align.report.html.logprobs import WORDS, largest_bound, metric_value
from rlk_align.report.html.page import render
from rlk_align.report.html.provenance import engine_facts, side_by_side
from rlk_align.report.html.svg import figure
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
    bounds = [largest_bound(run.source.verdict, edge) for run, edge in measured]
    rows.append(["the contract's bound on max |Δ|", *map(figure, bounds)])
    return EdgeView(
        name=name,
        drift=drift,
        columns=["figure", *(run.label for run, _ in measured)],
        rows=rows,
    )


def _edge(run: RunView, name: EdgeName) -> EdgeResult | None:
    c = run.source.verdict.comparison
    return None if c.stopped else next((e for e in c.edges if e.name == name), None)


def _engine_facts(run: RunView) -> dict[str, str]:
    """Returns the facts of both engines of a run, by side and name."""
    return {
        f"{side} {name}": value
        for side, engine in run.source.verdict.comparison.engines.items()
        for name, value in engine_facts(engine).items()
    }
