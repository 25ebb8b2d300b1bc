"""A document on a terminal or in a CI log."""

import textwrap
from collections.abc import Iterable, Iterator

from rich.console import Console, RenderableType

from rlk_align.report.columns import columns
from rlk_align.report.document import DataTable, Document, Fact, Section, Tone
from rlk_align.text import line

STYLES = {"pass": "bold green", "fail": "bold red", "inconclusive": "bold yellow"}
_TONES: dict[Tone, str] = {"": "", "soft": "dim", "doubt": "yellow", "breach": "red"}
_LABEL, _WIDTH = 9, 96
"""Columns of a label, and of a line."""
_SHOWN = 20
"""Rows of a table that are printed; the rest is counted."""


def show_document(document: Document, console: Console) -> None:
    """Prints a document. What comes from files is printed as text, not as markup."""
    head = line(f" {document.status.upper()} ", style=f"{STYLES[document.status]} reverse")
    console.print(head, line(document.headline, style="bold"))
    for part in _parts(document):
        console.print(part)


def _parts(document: Document) -> Iterator[RenderableType]:
    yield from _facts(document.facts)
    for section in document.sections:
        yield line()
        yield from _section(section)
    end = [Fact("run", document.folder, "soft")] if document.folder else []
    end += [Fact("next", document.next_step)] if document.next_step else []
    if end:
        yield line()
        yield from _facts(end)


def _facts(facts: Iterable[Fact]) -> Iterator[RenderableType]:
    for fact in facts:
        # A path and a command stay on one line, to be copied.
        whole = fact.label == "run" or "rlk-align " in fact.text
        texts = [f"{fact.label:{_LABEL}}{fact.text}"] if whole else _prose(fact.label, fact.text)
        yield from (line(text, style=_TONES[fact.tone]) for text in texts)


def _section(section: Section) -> Iterator[RenderableType]:
    style = _TONES[section.tone]
    yield line(section.heading, style=style or "bold")
    for text in section.text:
        yield from (line(x, style=style) for x in _prose("", text))
    if section.table is not None:
        yield from _table(section.table)
    for item in section.items:
        yield from (line(x, style=style) for x in _prose("", item, hanging=2))
    yield from _facts(section.facts)


def _prose(label: str, text: str, hanging: int = 0) -> list[str]:
    """The lines of a text beside its label."""
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=f"{label:{_LABEL}}",
        subsequent_indent=" " * (_LABEL + hanging),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _table(data: DataTable) -> Iterator[RenderableType]:
    table = columns(data.columns[: data.names], data.columns[data.names :])
    for row in data.rows[:_SHOWN]:
        table.add_row(*map(line, row))
    yield table
    if len(data.rows) > _SHOWN:
        yield line(f"and {len(data.rows) - _SHOWN} more")
