"""What became worse from one run to another, on a terminal and as a record."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlk_align.judge.contract import Contract
from rlk_align.judge.regression import RegressionCheck
from rlk_align.report.verdict_json import finite
from rlk_align.text import line

_SHOWN = 20


def show_regression(
    checks: list[RegressionCheck], contract: Contract, folders: tuple[Path, Path], console: Console
) -> None:
    """Prints what is worse than allowed; the figures of whole edges in any case."""
    worse = [check for check in checks if not check.holds]
    word, style = ("FAIL", "bold red") if worse else ("PASS", "bold green")
    head = f"regression limits of contract {contract.id} {contract.version}"
    console.print(line(f" {word} ", f"{style} reverse"), line(head))
    console.print(line(f"before   {folders[0]}"))
    console.print(line(f"after    {folders[1]}"))
    console.print()
    shown = [c for c in checks if c.site is None or not c.holds]
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("", "edge", "where", "metric"):
        table.add_column(name, no_wrap=True)
    for name in ("before", "after", "allowed"):
        table.add_column(name, justify="right", no_wrap=True)
    for c in shown[:_SHOWN]:
        where = " ".join(filter(None, [c.side, c.site]))
        mark = line("" if c.holds else "worse", "bold red")
        figures = (f"{x:.3g}" for x in (c.before, c.after, c.allowed))
        table.add_row(mark, line(c.edge), line(where), line(c.metric), *figures)
    console.print(table)
    if len(shown) > _SHOWN:
        console.print(line(f"and {len(shown) - _SHOWN} more"))
    console.print(line(f"{len(checks) - len(worse)} of {len(checks)} figures within their limits"))


def regression_json(
    checks: list[RegressionCheck], contract: Contract, exit_code: int
) -> dict[str, Any]:
    """The published record; a NaN is null there."""
    named = {"id": contract.id, "version": contract.version, "sha256": contract.sha256}
    return finite(
        {
            "schema": "rlk-align/regression/1",
            "status": "fail" if exit_code else "pass",
            "exit_code": exit_code,
            "contract": named,
            "checks": [c.model_dump() | {"holds": c.holds} for c in checks],
        }
    )
