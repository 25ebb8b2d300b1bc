"""A rescored dump on a terminal: the verdict, its mismatch by edge, and what to do."""

from rich.console import Console
from rich.table import Table

from rlk_align.report.explained_words import interval
from rlk_align.report.explained_words import sentence as explained_sentence
from rlk_align.report.rescored_words import chosen, next_command, temperature
from rlk_align.report.terminal import STYLES
from rlk_align.rescore.record import Rescored
from rlk_align.rescore.words import WHAT
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
        options = ",".join(f"{k}={v}" for k, v in engine.options.items())
        named = f"{engine.name}:{options}" if options else engine.name
        console.print(line(f"{side:8} {named}, {engine.dtype}, {engine.model}"))
    console.print(line(f"scored   {chosen(rescored)}"))
    console.print(line(f"         {temperature(rescored)}"))
    for note in rescored.notes:
        console.print(line(f"note     {note}", style="dim"))
    for doubt in rescored.doubts:
        console.print(line(f"doubt    {doubt}", style="yellow"))
    for edge, (_, metric, value, _) in rescored.breaches:
        console.print(line(f"breach   {edge}: {value:,.0f} {metric}", style="red"))
    console.print()
    console.print(_table(rescored))
    console.print()
    for edge in rescored.edges:
        console.print(line(f"{edge.name}: {WHAT[edge.name]}", style="dim"))
    console.print()
    console.print(line(f"run      {scores}", style="dim"))
    console.print(line(f"next     {next_command(rescored.next, dump, scores)}"))


def _table(rescored: Rescored) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("edge", "mean |Δ|", "share", "p99 |Δ|", "k3", "E[ρ]", "c", "looks like"):
        table.add_column(name, justify="left" if name in ("edge", "looks like") else "right")
    for edge in rescored.edges:
        m = edge.metrics
        looks = edge.diagnosis or ("equal" if m.tokens and not m.bit_mismatches else "")
        share = f"{edge.share.value:.0%}" if edge.share.value >= 0 else ""
        cells = (edge.name, interval(edge.mean), share, f"{m.p99_abs_dlogp:.4g}")
        cells += (f"{m.k3:.3g}", f"{m.ratio_mean:.4f}", f"{edge.c.value:.3g}", looks)
        table.add_row(*map(line, cells))
    own = rescored.own
    cells = ("the dump", f"{own.mean_abs_dlogp:.4g}", "", f"{own.p99_abs_dlogp:.4g}")
    cells += (f"{own.k3:.3g}", f"{own.ratio_mean:.4f}", "", "")
    table.add_row(*map(line, cells))
    return table
