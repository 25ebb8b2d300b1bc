"""What became worse from one run to another, on a terminal."""

from pathlib import Path

from rich.console import Console

from rlk_align.judge.regression import RegressionVerdict
from rlk_align.report.columns import columns
from rlk_align.report.terminal import STYLES
from rlk_align.text import line

_SHOWN = 20


def show_regression(
    verdict: RegressionVerdict, folders: tuple[Path, Path], console: Console
) -> None:
    """Prints what is worse than allowed; the figures of whole edges in any case."""
    contract, checks, worse = verdict.contract, verdict.checks, verdict.worse
    head = line(f" {verdict.status.upper()} ", f"{STYLES[verdict.status]} reverse")
    console.print(head, line(f"regression limits of contract {contract.id} {contract.version}"))
    console.print(line(f"before   {folders[0]}"))
    console.print(line(f"after    {folders[1]}"))
    console.print()
    for doubt in verdict.doubts[:_SHOWN]:
        console.print(line(f"doubt    {doubt}"))
    if verdict.doubts:
        return
    shown = [c for c in checks if c.site is None or not c.holds]
    table = columns(("", "edge", "where", "metric"), ("before", "after", "allowed"))
    for c in shown[:_SHOWN]:
        where = " ".join(filter(None, [c.side, c.site]))
        mark = line("" if c.holds else "worse", "bold red")
        figures = (f"{x:.3g}" for x in (c.before, c.after, c.allowed))
        table.add_row(mark, line(c.edge), line(where), line(c.metric), *figures)
    console.print(table)
    if len(shown) > _SHOWN:
        console.print(line(f"and {len(shown) - _SHOWN} more"))
    console.print(line(f"{len(checks) - len(worse)} of {len(checks)} figures within their limits"))
