"""The picture of a run for slides and papers: drift by operator, and a histogram of Δlogp."""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlk_align.errors import BadOption, MissingDependency
from rlk_align.judge.verdict import headline
from rlk_align.report.drift import DriftAxis, DriftSeries, drift_series
from rlk_align.report.html.logprobs import largest_bound
from rlk_align.report.html.samples import deltas
from rlk_align.report.source import ReportSource
from rlk_align.report.words import engine_spec
from rlk_align.results import EdgeName, EdgeResult
from rlk_align.text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
_SIZE, _DPI = (12.0, 6.6), 150
_COLOURS = ("#c2410c", "#1d4ed8")
"""A colour for each run; they differ in lightness too, for grey print."""
_STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    # A `$` in a name is a dollar sign, and text in an SVG can be searched.
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "rlk-align",
}
_LEGEND: dict[str, Any] = {"fontsize": 8, "edgecolor": "none", "framealpha": 0.9}
_BINS = 61


@dataclass(frozen=True, kw_only=True)
class ChartSeries:
    """One run's values on the edge that is drawn."""

    drift: DriftSeries
    delta: np.ndarray | None
    """Δlogp of every sampled token, float64 `[N]`, in nats; None where the run kept no rows."""
    bound: float | None
    """The contract's limit on max |Δlogp|, in nats."""


def check_chart_path(path: Path) -> None:
    """Raises BadOption for a suffix of no known format, MissingDependency without matplotlib."""
    if path.suffix.lower() not in SUFFIXES:
        raise BadOption(
            f"{path}: a chart cannot be written as {path.suffix or 'a file without a suffix'!r}",
            f"name a file that ends with one of {', '.join(SUFFIXES)}",
        )
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"report chart needs {error.name!r}, which is not installed",
            "pip install 'rlk-align[charts]'",
        ) from error


def chart_file(suffix: str, source: ReportSource, without: ReportSource | None = None) -> bytes:
    """Returns the picture of `run_chart` as a file with one of SUFFIXES; the same run gives the
    same bytes. Raises the errors of `run_chart`."""
    import matplotlib

    kind, file = suffix.lower()[1:], BytesIO()
    undated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(kind)
    with matplotlib.rc_context(_STYLE):
        run_chart(source, without).savefig(file, format=kind, metadata=undated)
    return file.getvalue()


def run_chart(source: ReportSource, without: ReportSource | None = None) -> "Figure":
    """Draws a run, and in the same axes the run of the same engines `without` the kernels, if any.

    The edge is the headline of the first drawn run's verdict. Raises BadOption where a run has no
    values on that edge.
    """
    edge = _edge_of(without or source)
    series = [_series(source, "kernels on" if without else "", edge)]
    if without is not None:
        series.insert(0, _series(without, "kernels off", edge))
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=(1.7, 1))
    figure.suptitle(_title(without or source, edge), fontsize=10, x=0.01, ha="left")
    _draw_drift(upper, series)
    _draw_histogram(lower, series)
    figure.align_ylabels()
    return figure


def _edge_of(source: ReportSource) -> EdgeName:
    edge = None if source.verdict.comparison.stopped else headline(source.verdict)
    if edge is None:
        raise BadOption(
            f"{source.folder} has no values to draw: its comparison stopped before computing any",
            f"rlk-align gate {source.folder} says why",
        )
    return edge.name


def _series(source: ReportSource, label: str, name: EdgeName) -> ChartSeries:
    edge = next((e for e in source.verdict.comparison.edges if e.name == name), None)
    if edge is None:
        raise BadOption(f"{source.folder} does not have the edge {name}", "compare both runs again")
    drift = drift_series(source, edge, label)
    differ = [o for o in drift.operators if o.site.differ]
    if not drift.operators or (differ and all(o.mean is None for o in differ)):
        raise BadOption(
            f"{source.folder} has no values to draw: {len(differ)} operators of {name} differ, and "
            "it keeps the values of none",
            "compare again with a larger --trace-budget",
        )
    return ChartSeries(
        drift=drift,
        delta=_deltas(source, edge),
        bound=largest_bound(source.verdict, edge),
    )


def _deltas(source: ReportSource, edge: EdgeResult) -> np.ndarray | None:
    return deltas(source, edge) if source.run.has_rows else None


def _title(source: ReportSource, edge: EdgeName) -> str:
    c = source.verdict.comparison
    engines = [f"{engine_spec(e)} {e.version}" for e in (c.engines["rollout"], c.engines["train"])]
    return printable(f"{engines[0]}  vs  {engines[1]}   {c.dtype}, {c.tokens:,} tokens, {edge}")


def _draw_drift(axes: "Axes", series: Sequence[ChartSeries]) -> None:
    """Draws each operator's relative L2 error: a logarithmic axis, and a lane for exact zeros."""
    axis = DriftAxis([s.drift for s in series])
    sites = axis.sites
    means = [o.mean for s in series for o in s.drift.operators if o.mean is not None]
    positive = [m for m in means if m > 0 and np.isfinite(m)]
    low = 10.0 ** np.floor(np.log10(min(positive, default=1e-3)))
    high = 10.0 ** np.ceil(np.log10(max(positive, default=1.0)) + 0.05)
    zero = low / 3.2
    axes.set_yscale("log")
    axes.set_ylim(zero / 1.8, high)
    axes.set_xlim(-0.7, len(sites) - 0.3)
    axes.axhspan(zero / 1.8, zero * 1.8, color="#f1f5f9", zorder=0)
    for s, colour in zip(series, _COLOURS, strict=False):
        means_of_run = axis.values(s.drift, "mean")
        # A missing value breaks the line.
        y = [np.nan if v is None else zero if v == 0 else v for v in means_of_run]
        whose = f"{s.drift.label}, " if s.drift.label else ""
        style: dict[str, Any] = {"color": colour, "clip_on": False}
        label = f"{whose}mean of the rows that differ"
        axes.plot(range(len(sites)), y, "-o", ms=3, lw=1.2, label=label, **style)
        bad = [n for n, v in enumerate(means_of_run) if v is not None and not np.isfinite(v)]
        if bad:
            axes.plot(bad, [high] * len(bad), "x", label=f"{whose}NaN or infinite", **style)
        missing = sum(v is None for v in means_of_run)
        if missing:
            # A separate entry of the legend, without a mark.
            axes.plot([], [], " ", label=f"{whose}{missing} operators without values")
    _name_layers(axes, axis)
    axes.set_xticks(
        range(len(sites)) if axis.named else [],
        [printable(site.op) for site in sites] if axis.named else [],
        rotation=90,
        fontsize=6.5,
    )
    powers = range(int(np.log10(low)), int(np.log10(high)) + 1)
    axes.set_yticks([zero, *(10.0**p for p in powers)], ["exact 0", *(f"1e{p}" for p in powers)])
    axes.minorticks_off()
    axes.grid(axis="y", color="#e2e8f0", lw=0.6)
    axes.set_ylabel("relative L2 error of the output")
    axes.legend(**_LEGEND, loc="lower right", bbox_to_anchor=(1, 0.18))


def _name_layers(axes: "Axes", axis: DriftAxis) -> None:
    last = -np.inf
    for layer, first, count in axis.layers():
        if layer % 2 == 0:
            axes.axvspan(first - 0.5, first + count - 0.5, color="#f8fafc", zorder=-1)
        if first - last >= len(axis.sites) / 24:
            top: dict[str, Any] = {
                "transform": axes.get_xaxis_transform(),
                "fontsize": 8,
                "color": "#475569",
            }
            axes.text(first - 0.4, 1.01, f"layer {layer}", **top)
            last = first


def _draw_histogram(axes: "Axes", series: Sequence[ChartSeries]) -> None:
    """Draws how many tokens have which Δlogp, with counts on a logarithmic axis."""
    known = [(s, c, s.delta) for s, c in zip(series, _COLOURS, strict=False) if s.delta is not None]
    axes.set_xlabel("Δlogp of a sampled token (nats)")
    axes.set_ylabel("tokens")
    if not known:
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "this run keeps no log-probs by token", ha="center", color="#475569")
        return
    finite = [delta[np.isfinite(delta)] for _, _, delta in known]
    span = max(float(np.abs(d).max(initial=0.0)) for d in finite)
    span = max(span, *(s.bound or 0.0 for s in series)) * 1.05 or 1e-3
    axes.set_yscale("log")
    for (s, colour, delta), values in zip(known, finite, strict=True):
        counts, edges = np.histogram(values, bins=_BINS, range=(-span, span))
        label = s.drift.label or f"{len(delta):,} tokens"
        if not np.any(values):
            label += f": all {len(values):,} are exactly 0"
        if lost := len(delta) - len(values):
            label += f"; {lost:,} NaN or infinite are omitted"
        axes.stairs(counts, edges, baseline=0.7, fill=True, color=colour, alpha=0.75, label=label)
    for sign in (-1, 1):
        if series[0].bound:
            limit = f"the contract's limit, ±{series[0].bound:.3g}" if sign < 0 else None
            axes.axvline(sign * series[0].bound, color="#475569", ls="--", lw=1, label=limit)
    axes.set_xlim(-span, span)
    axes.set_ylim(bottom=0.7)
    axes.yaxis.set_major_formatter(lambda count, _: f"{count:,.0f}")
    axes.minorticks_off()
    # The legend is above the axes, because the line of a limit may be anywhere inside.
    axes.legend(**_LEGEND, loc="lower right", bbox_to_anchor=(1, 1), ncols=3)
