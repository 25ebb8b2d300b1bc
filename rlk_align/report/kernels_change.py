"""What the kernels change: the drift of a pair of engines without them, and with them."""

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from rlk_align.judge.verdict import Verdict, headline
from rlk_align.report.document import DataTable
from rlk_align.report.document_terminal import STYLES, table_parts
from rlk_align.report.words import EDGE_FIGURES, edge_figures
from rlk_align.results import EdgeMetrics
from rlk_align.text import line

PRODUCTION = "production_vs_observed"
SHOWN = ("max |Δ|", "mean |Δ|", "k3", "≠ bits")
"""The figures of an edge that fit into 80 columns."""


def show_change(off: Verdict, on: Verdict, folder: Path, console: Console) -> None:
    """Prints a line for each verdict, and for each edge that both runs have its figures without the
    kernels above those with them. `folder`: the run without the kernels."""
    console.print()
    for kernels, verdict in (("off", off), ("rlk", on)):
        status = line(f" {verdict.status.upper()} ", style=STYLES[verdict.status] + " reverse")
        console.print(f"kernels {kernels} ", status, line(_in_short(verdict)))
    console.print(line(f"the run without the kernels: {folder}", style="dim"))
    rows = list(_rows(off, on))
    if not rows:
        return
    console.print()
    columns = ("edge", "kernels", *SHOWN)
    table = DataTable(name="change", caption="", columns=columns, rows=rows, names=2)
    for part in table_parts(table, console):
        console.print(part)


def _in_short(verdict: Verdict) -> str:
    """States in one line what a verdict rests on."""
    if verdict.comparison.stopped:
        return "the precheck stopped the comparison"
    edge = headline(verdict)
    if edge is None or edge.first_bitwise is None:
        return "no first divergence"
    breaches = f"; {len(verdict.breaches):,} limits exceeded" if verdict.breaches else ""
    return f"first divergence: {edge.first_bitwise.site}{breaches}"


def _rows(off: Verdict, on: Verdict) -> Iterator[list[str]]:
    without, with_them = _edges(off), _edges(on)
    for name in without:
        if name in with_them:
            for kernels, metrics in (("off", without[name]), ("rlk", with_them[name])):
                figures = dict(zip(EDGE_FIGURES, edge_figures(metrics), strict=True))
                first = name if kernels == "off" else ""
                yield [first, kernels, *(figures[column] for column in SHOWN)]


def _edges(verdict: Verdict) -> dict[str, EdgeMetrics]:
    """Returns the metrics of each compared edge, and of the production mode where it was
    measured."""
    c = verdict.comparison
    if c.stopped:
        return {}
    edges: dict[str, EdgeMetrics] = {e.name: e.metrics for e in c.edges}
    return edges if c.production is None else edges | {PRODUCTION: c.production}
