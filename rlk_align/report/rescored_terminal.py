"""A rescored dump on a terminal: the verdict, its mismatch by edge, and what to do."""

from rich.console import Console, JustifyMethod
from rich.table import Table

from rlk_align.logs.rescore.record import Rescored
from rlk_align.logs.rescore.words import WHAT
from rlk_align.report.explained_words import sentence as explained_sentence
from rlk_align.report.rescored_words import (
    EDGE_COLUMNS,
    breaches,
    chosen,
    edge_rows,
    engine_words,
    next_command,
    temperature,
)
from rlk_align.report.terminal import STYLES
from rlk_align.text import line


def show_rescored(rescored: Rescored, dump: str, scores: str, console: Console) -> None:
    """Prints the verdict on a rescored dump. What comes from files is printed as text."""
    explained = rescored.explained
    contract = explained.contract
    head = line(f" {rescored.status.upper()} ", style=STYLES[rescored.status] + " reverse")
    console.print(head, line(rescored.sentence, style="bold"))
    console.print(line(f"dump     {explained_sentence(explained)}"))
    console.print(line(f"contract {contract.id} {contract.version}, {explained.dtype}"))
    for side, engine in rescored.engines.items():
        console.print(line(f"{side:8} {engine_words(engine)}"))
    console.print(line(f"scored   {chosen(rescored)}"))
    console.print(line(f"         {temperature(rescored)}"))
    for note in rescored.notes:
        console.print(line(f"note     {note}", style="dim"))
    for doubt in rescored.doubts:
        console.print(line(f"doubt    {doubt}", style="yellow"))
    for breach in breaches(rescored):
        console.print(line(f"breach   {breach}", style="red"))
    console.print()
    console.print(_table(rescored))
    console.print()
    for edge in rescored.edges:
        console.print(line(f"{edge.name}: {WHAT[edge.name]}", style="dim"))
    console.print()
    console.print(line(f"run      {scores}", style="dim"))
    console.print(line(f"next     {next_command(rescored.next, dump, scores)}"))


def _table(rescored: Rescored) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in EDGE_COLUMNS:
        justify: JustifyMethod = "left" if name in ("edge", "looks like") else "right"
        table.add_column(name, justify=justify, no_wrap=True)
    for cells in edge_rows(rescored):
        table.add_row(*map(line, cells))
    return table
