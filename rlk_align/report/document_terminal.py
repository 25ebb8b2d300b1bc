"""A document on a terminal or in a CI log."""

import textwrap
from collections.abc import Iterable, Iterator

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from rlk_align.report.document import DataTable, Document, Entry, Fact, Section, Tone
from rlk_align.text import line

STYLES = {"pass": "bold green", "fail": "bold red", "inconclusive": "bold yellow"}
_TONES: dict[Tone, str] = {"": "", "soft": "dim", "doubt": "yellow", "breach": "red"}
_LABEL, _WIDTH = 9, 96
"""The width of a label, and that of a line, in columns."""
_ITEMS, _ROWS = 8, 20
"""The most entries of a list and rows of a table that are printed; the rest is counted."""


def show_document(document: Document, console: Console) -> None:
    """Prints a document. Its texts are never interpreted as markup."""
    head = line(f" {document.status.upper()} ", style=f"{STYLES[document.status]} reverse")
    console.print(head, line(document.headline, style="bold"))
    for part in _parts(document, console):
        console.print(part)


def _parts(document: Document, console: Console) -> Iterator[RenderableType]:
    yield from map(line, _wrapped(document.text))
    yield from _facts(document.facts)
    for section in document.sections:
        yield line()
        yield from _section(section, console)
    end = [Fact("run", document.folder, "soft")] if document.folder else []
    labels = ("next", *[""] * len(document.next_steps))
    end += [Fact(*step) for step in zip(labels, document.next_steps, strict=False)]
    if end:
        yield line()
        yield from _facts(end)


def _facts(facts: Iterable[Fact]) -> Iterator[Text]:
    for fact in facts:
        start = f"{fact.label} " if len(fact.label) >= _LABEL else f"{fact.label:{_LABEL}}"
        # A path or a command stays on one line, so that it can be copied.
        unbroken = fact.label == "run" or "rlk-align " in fact.text
        texts = [start + fact.text] if unbroken else _wrapped(fact.text, start, " " * _LABEL)
        yield from (line(text, style=_TONES[fact.tone]) for text in texts)


def _section(section: Section, console: Console) -> Iterator[RenderableType]:
    style = _TONES[section.tone]
    yield line(section.heading, style=style or "bold")
    for text in section.text:
        yield from (line(x, style) for x in _wrapped(text, "  ", "  "))
    if section.table is not None:
        yield from table_parts(section.table, console)
    for entry in section.entries[:_ITEMS]:
        yield from _entry(entry, "dim" if section.tone == "soft" else "")
    if len(section.items) > _ITEMS:
        yield line(f"  and {len(section.items) - _ITEMS} more")
    yield from _facts(section.facts)


def _entry(entry: Entry, style: str) -> Iterator[Text]:
    if entry.title:
        yield line("  ") + line(entry.title, "bold") + line(f"  {entry.text}")
    else:
        yield from (line(text, style) for text in _fitting("  ", entry.text))
    for detail in entry.details:
        yield from (line(text, style) for text in _fitting("    ", detail))


def _fitting(start: str, text: str) -> Iterator[str]:
    """Yields one line, or where that is too long separate lines for each clause."""
    first, *rest = [text] if len(start + text) <= _WIDTH else text.split("; ")
    yield from _wrapped(first, start, f"{start}  ")
    for clause in rest:
        yield from _wrapped(clause, f"{start}  ", f"{start}    ")


def _wrapped(text: str, first: str = "", later: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )


def table_parts(data: DataTable, console: Console) -> Iterator[RenderableType]:
    """Yields a table, or where it is too wide a line for each figure: none is ever cut."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for at, name in enumerate(data.columns):
        table.add_column(name, justify="left" if at < data.names else "right", no_wrap=True)
    rows = data.rows[:_ROWS]
    for row in rows:
        table.add_row(*map(line, row))
    unbounded = console.options.update(max_width=1000)
    if Measurement.get(console, unbounded, table).maximum <= console.width:
        yield table
    else:
        for row in rows:
            yield line("  ".join(filter(None, row[: data.names])))
            named = zip(data.columns[data.names :], row[data.names :], strict=True)
            yield from (line(f"  {name:<9}{value}") for name, value in named)
    if len(data.rows) > _ROWS:
        yield line(f"  and {len(data.rows) - _ROWS} more")
