"""What became of the weights, on a terminal."""

import math
from collections.abc import Sequence

from rich.console import Console

from rlk_align.report.document_terminal import STYLES
from rlk_align.text import line, printable
from rlk_align.weights.findings import EXPECTED, Finding, WeightsReport

_SHOWN = 20
"""Parameters that are named; the rest is counted."""
_STYLES = dict.fromkeys(("stale", "missing", "other"), "red")


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
        _print_findings(unequal, console)
    if not report.compared:
        console.print(line("A and B have no parameter in common: nothing was compared"))
    if report.exit_code == 1:
        console.print()
        console.print(line(f"next     {_next(report)}"))


def _summary(report: WeightsReport) -> str:
    counts = [f"{n:,} {status}" for status, n in report.counts.items() if n]
    return f"{len(report.findings):,} parameters: {', '.join(counts) or 'none'}"


def _print_findings(findings: Sequence[Finding], console: Console) -> None:
    shown = findings[:_SHOWN]
    width = max(len(printable(f.name)) for f in shown)
    for f in shown:
        extent = ""
        if f.differing is not None and f.max_abs_difference is not None and f.a is not None:
            share = f.differing / math.prod(f.a.shape)
            extent = f"; {share:.2%} of the entries, by up to {f.max_abs_difference:.3g}"
        console.print(
            line(f"{printable(f.name):<{width}}  {f.status:<7}", _STYLES.get(f.status, "")),
            line(f"{f.detail}{extent}"),
        )
    if len(findings) > _SHOWN:
        console.print(line(f"and {len(findings) - _SHOWN:,} more; --output json=PATH has them all"))


def _next(report: WeightsReport) -> str:
    """What to do about the first kind of failure that there is."""
    counts = report.counts
    if counts["stale"]:
        steps = sorted({f.step for f in report.findings if f.step})
        return f"these parameters were not synced since {', '.join(steps)}: check what sends them"
    if counts["missing"]:
        return "check which names the sender and the receiver use for the missing parameters"
    if report.earlier:
        return (
            "B equals none of the earlier steps: check how it was converted or merged (--adapter)"
        )
    return (
        "give earlier checkpoints (--earlier) or the adapter (--adapter) to find where it "
        "comes from"
    )
