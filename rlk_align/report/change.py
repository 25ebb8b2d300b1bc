"""What the kernels change: the drift of a pair of engines without them, and with them."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlk_align.judge.verdict import Verdict
from rlk_align.report.words import EDGE_FIGURES, edge_figures
from rlk_align.text import line

SHOWN = ("max |Δ|", "mean |Δ|", "k3", "≠ bits")
"""Of the figures of an edge: as many as 80 columns hold."""


def show_change(off: Verdict, on: Verdict, console: Console) -> None:
    """Prints the figures of each edge that both have, without the kernels above those with them."""
    rows = list(_rows(off, on))
    if not rows:
        return
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("edge", "kernels"):
        table.add_column(column, no_wrap=True)
    for name in SHOWN:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print()
    console.print(table)


def _rows(off: Verdict, on: Verdict) -> Iterator[list[Text | str]]:
    without, with_them = (
        {} if v.comparison.stopped else {e.name: e for e in v.comparison.edges} for v in (off, on)
    )
    for name in without:
        if name in with_them:
            for kernels, edge in (("off", without[name]), ("rlk", with_them[name])):
                figures = dict(zip(EDGE_FIGURES, edge_figures(edge), strict=True))
                first = line(name) if kernels == "off" else ""
                yield [first, kernels, *(figures[column] for column in SHOWN)]
