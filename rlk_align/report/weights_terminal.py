"""What became of the weights, on a terminal."""

import math
from collections.abc import Sequence

from rich.console import Console

from rlk_align.report.columns import columns
from rlk_align.report.terminal import STYLES
from rlk_align.text import line
from rlk_align.weights.findings import EXPECTED, Finding, WeightsReport

_SHOWN = 20
"""Parameters that the table names; the rest is counted."""


def show_weights(report: WeightsReport, console: Console) -> None:
    """Prints how many parameters have which status, then those that are not equal."""
    style = STYLES[report.status] + " reverse"
    console.print(line(f" {report.status.upper()} ", style=style), line(_summary(report)))
    console.print(line(f"A        {report.a}  ({report.kinds[0]})"))
    console.print(line(f"B        {report.b}  ({report.kinds[1]})"))
    if report.adapter:
        console.print(line(f"adapter  {report.adapter}"))
    if report.earlier:
        console.print(line(f"earlier  {', '.join(report.earlier)}"))
    unequal = [f for f in report.findings if f.status != "equal"]
    # What fails comes first; the rest keeps the order of the model.
    unequal.sort(key=lambda f: f.status in EXPECTED)
    if unequal:
        console.print()
        _print_table(unequal, console)
    if not report.compared:
        console.print(line("A and B have no parameter in common: nothing was compared"))
    if report.exit_code == 1:
        console.print()
        console.print(line(f"next     {_next(report)}"))


def _summary(report: WeightsReport) -> str:
    counts = [f"{n:,} {status}" for status, n in report.counts.items() if n]
    return f"{len(report.findings):,} parameters: {', '.join(counts) or 'none'}"


def _print_table(findings: Sequence[Finding], console: Console) -> None:
    table = columns(["parameter", "status", "what is known"], ["differ", "largest"])
    for f in findings[:_SHOWN]:
        figures = ["", ""]
        if f.differing is not None and f.a is not None:
            figures = [f"{f.differing / math.prod(f.a.shape):.1%}", f"{f.max_abs_difference:.3g}"]
        table.add_row(line(f.name), line(f.status), line(f.detail), *map(line, figures))
    console.print(table)
    if len(findings) > _SHOWN:
        console.print(line(f"and {len(findings) - _SHOWN:,} more; --output json=PATH has all"))


def _next(report: WeightsReport) -> str:
    """What to do about the first kind of failure that there is."""
    counts = report.counts
    if counts["stale"]:
        steps = sorted({f.step for f in report.findings if f.step})
        return f"these parameters were not synced since {', '.join(steps)}: see what sends them"
    if counts["missing"]:
        return "see which names the sender and the receiver use for the parameters that are missing"
    if report.earlier:
        return "B is none of the earlier steps: see how it was converted or merged (--adapter)"
    return "give earlier checkpoints (--earlier) or the adapter (--adapter) to say where it is from"
