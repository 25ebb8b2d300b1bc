"""What was explained of a run, on a terminal: the verdict, what shows it, and what to do."""

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.table import Table

from rlk_align.diagnose.explain import Explanation
from rlk_align.diagnose.record import Diagnosis, Token
from rlk_align.report.explained_words import BLIND, interval, next_command, scope, sentence
from rlk_align.report.terminal import STYLES
from rlk_align.text import line


def show_explanation(explained: Explanation, folder: str, console: Console) -> None:
    """Prints the verdict on a run. What comes from files is printed as text, not as markup."""
    contract = explained.contract
    head = line(f" {explained.status.upper()} ", style=STYLES[explained.status] + " reverse")
    console.print(head, line(sentence(explained), style="bold"))
    console.print(line(f"contract {contract.id} {contract.version}, {explained.dtype}"))
    console.print(line(f"looked at {scope(explained)}"))
    console.print(line(f"E[ρ]     {interval(explained.mean_ratio)}   1 where the laws agree"))
    console.print(line(f"c        {interval(explained.c)}   |Δ| for each 1 − p"))
    for doubt in explained.doubts:
        console.print(line(f"doubt    {doubt}", style="yellow"))
    for item in explained.untested:
        console.print(line(f"untested {item.name}: {item.why}", style="dim"))
    for limit, metric, value, bound in explained.breaches:
        if limit == "numerics":
            console.print(line(f"breach   {metric} is {value:.4g}, {bound:g} allowed", style="red"))
    for place, diagnosis in enumerate(explained.diagnoses):
        console.print()
        for part in _diagnosis(diagnosis, place > 0):
            console.print(part)
    console.print()
    console.print(line(f"cannot be told from a dump: {'; '.join(BLIND)}", style="dim"))
    console.print(line(f"run      {folder}", style="dim"))
    if explained.diagnoses:
        console.print(line(f"next     {next_command(explained.diagnoses[0].next, folder)}"))


def _diagnosis(diagnosis: Diagnosis, further: bool) -> Iterator[RenderableType]:
    head = f"also     {diagnosis.name}" if further else f"verdict  {diagnosis.name}"
    yield line(f"{head}, confidence {diagnosis.confidence}", style="" if further else "bold")
    yield line(f"         {diagnosis.why}")
    yield line(
        f"         {diagnosis.statistic}: {diagnosis.value:.4g} "
        f"({diagnosis.low:.4g} to {diagnosis.high:.4g}), limit {diagnosis.limit:g}"
    )
    if diagnosis.samples and not further:
        yield _tokens(diagnosis.samples)


def _tokens(tokens: list[Token]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("         sequence", "position", "token", "rollout", "trainer"):
        table.add_column(name, justify="left" if "sequence" in name else "right", overflow="fold")
    for token in tokens:
        numbers = (_value(token.rollout), _value(token.train))
        cells = (f"         {token.id}", str(token.position), str(token.token), *numbers)
        table.add_row(*map(line, cells))
    return table


def _value(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"
