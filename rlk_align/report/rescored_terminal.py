"""A rescored dump on a terminal: the verdict, its mismatch by edge, and what to do."""

from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from rlk_align.report.explained_words import sentence as explained_sentence
from rlk_align.report.rescored_words import chosen, next_command, temperature
from rlk_align.report.terminal import STYLES
from rlk_align.rescore.record import Rescored
from rlk_align.rescore.words import WHAT, percent
from rlk_align.results import EdgeMetrics
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
    for name, (_, metric, value, bound) in rescored.breaches:
        said = f"breach   {name}: {metric} is {value:.3g}, {bound:g} allowed"
        console.print(line(said, style="red"))
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
    for name in ("edge", "mean |Δ|", "share", "k3", "E[ρ]", "c", "looks like"):
        justify: JustifyMethod = "left" if name in ("edge", "looks like") else "right"
        table.add_column(name, justify=justify, no_wrap=True)
    for edge in rescored.edges:
        equal = edge.metrics.tokens and not edge.metrics.bit_mismatches
        looks = edge.diagnosis or ("equal" if equal else "")
        c = f"{edge.c.value:.2g}"
        table.add_row(*_cells(edge.name, edge.metrics, percent(edge.share), c, looks))
    table.add_row(*_cells("the dump", rescored.own, "", "", ""))
    return table


def _cells(name: str, m: EdgeMetrics, share: str, c: str, looks: str) -> list[Text]:
    numbers = (f"{m.mean_abs_dlogp:.2g}", share, f"{m.k3:.2g}")
    return [line(text) for text in (name, *numbers, f"{m.ratio_mean:.4f}", c, looks)]
