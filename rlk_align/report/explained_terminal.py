"""What was explained of a run, on a terminal: the verdict, what shows it, and what to do."""

import textwrap
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.table import Table

from rlk_align.logs.diagnose.explain import Explanation
from rlk_align.logs.diagnose.record import Diagnosis, Token
from rlk_align.report.explained_words import (
    BLIND,
    breach_words,
    interval,
    next_command,
    scope,
    sentence,
    value_words,
)
from rlk_align.report.terminal import STYLES
from rlk_align.text import line


def show_explanation(explained: Explanation, folder: str, console: Console) -> None:
    """Prints the verdict on a run. What comes from files is printed as text, not as markup."""
    contract = explained.contract
    head = line(f" {explained.status.upper()} ", style=STYLES[explained.status] + " reverse")
    console.print(head, line(sentence(explained), style="bold"))
    console.print(line(f"contract {contract.id} {contract.version}, {explained.dtype}"))
    console.print(line(f"judged   {scope(explained)}"))
    console.print(
        line(f"E[ρ]     {interval(explained.mean_ratio)}   1 where the distributions agree")
    )
    console.print(line(f"c        {interval(explained.c)}   |Δ| per 1 − p"))
    for doubt in explained.doubts:
        for text in _prose("doubt", doubt):
            console.print(line(text, style="yellow"))
    for item in explained.untested:
        for text in _prose("untested", f"{item.name}: {item.why}"):
            console.print(line(text, style="dim"))
    for breach in explained.breaches:
        if breach[0] == "numerics":
            console.print(line(f"breach   {breach_words(breach)}", style="red"))
    for place, diagnosis in enumerate(explained.diagnoses):
        console.print()
        for part in _diagnosis(diagnosis, place > 0):
            console.print(part)
    console.print()
    for text in _prose("unknown", f"a dump cannot tell: {'; '.join(BLIND)}"):
        console.print(line(text, style="dim"))
    console.print(line(f"run      {folder}", style="dim"))
    if explained.diagnoses:
        todo = next_command(explained.diagnoses[0].next, folder)
        # A command stays on one line, to be copied.
        for text in [f"next     {todo}"] if "rlk-align" in todo else _prose("next", todo):
            console.print(line(text))


def _diagnosis(diagnosis: Diagnosis, further: bool) -> Iterator[RenderableType]:
    head = f"also     {diagnosis.name}" if further else f"verdict  {diagnosis.name}"
    yield line(f"{head}, confidence {diagnosis.confidence}", style="" if further else "bold")
    yield from map(line, _prose("", diagnosis.why))
    yield from map(line, _prose("", value_words(diagnosis)))
    if diagnosis.samples and not further:
        yield _tokens(diagnosis.samples)


def _prose(label: str, text: str) -> list[str]:
    """The lines of a text beside its label."""
    first, later = f"{label:9}", " " * 9
    wrapper = textwrap.TextWrapper(96, first, later, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text)


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
