"""A document as Markdown, for a pull request.

It is always below 64 KB, the limit of a forge for a comment: long lists and tables are cut with a
count of the rest, and sections that do not fit are omitted by name.
"""

from collections.abc import Iterable, Iterator

from rlk_align.report.document import DataTable, Document, Entry, Fact, Section
from rlk_align.report.markup import block, code, prose, table
from rlk_align.text import printable

LARGEST = 64_000
"""The most bytes of a comment."""
_SHOWN = 20
"""The most entries of a list or rows of a table that are shown; the rest is counted."""
_LONGEST_COMMAND = 2000


def document_markdown(document: Document) -> str:
    """Renders a document."""
    text = "\n\n".join(_head(document)) + "\n"
    omitted = []
    for section in document.sections:
        part = "\n" + "\n\n".join(_section(section)) + "\n"
        # This leaves room for the command and for the names of omitted sections.
        if len((text + part).encode()) <= LARGEST - 2 * _LONGEST_COMMAND - 1000:
            text += part
        else:
            omitted.append(section.heading)
    if document.command:
        text += f"\n### to make the run again\n\n{block(_command(document.command))}\n"
    if omitted:
        text += f"\nOmitted because they are too long: {'; '.join(map(prose, omitted))}.\n"
    return text


def _command(command: str) -> str:
    if len(command) <= _LONGEST_COMMAND:
        return printable(command)
    return "the command is too long for a comment; the run's run.json has it"


def _head(document: Document) -> Iterator[str]:
    yield f"## rlk-align: {document.status.upper()}"
    yield f"**{prose(document.headline)}**"
    if document.text:
        yield prose(document.text)
    steps = [f"- **next:** {_step(step)}" for step in document.next_steps]
    if facts := [*steps, *_facts(document.facts)]:
        yield "\n".join(facts)


def _step(step: str) -> str:
    """Writes a step, with the command before or behind its colon as code."""
    if ": " not in step:
        return prose(step)
    parts = step.split(": ", 1)
    return ": ".join((code if part.startswith("rlk-align ") else prose)(part) for part in parts)


def _facts(facts: Iterable[Fact]) -> Iterator[str]:
    for fact in facts:
        label = f"- **{prose(fact.label)}:**" if fact.label else "  -"
        yield f"{label} {prose(fact.text)}"


def _section(section: Section) -> Iterator[str]:
    yield f"### {prose(section.heading)}"
    yield from map(prose, section.text)
    if section.table is not None:
        yield _table(section.table)
    if section.items:
        shown = [_entry(entry) for entry in section.entries[:_SHOWN]]
        more = len(section.items) - len(shown)
        yield "\n".join([*shown, *([f"- and {more} more"] if more else [])])
    if section.facts:
        yield "\n".join(_facts(section.facts))


def _entry(entry: Entry) -> str:
    title = f"**{code(entry.title)}**: " if entry.title else ""
    details = (f"\n  - {prose(detail)}" for detail in entry.details)
    return f"- {title}{prose(entry.text)}{''.join(details)}"


def _table(data: DataTable) -> str:
    rows = [[prose(cell, starts_line=False) for cell in row] for row in data.rows[:_SHOWN]]
    more = f"\n\nand {len(data.rows) - _SHOWN} more" if len(data.rows) > _SHOWN else ""
    return table(list(data.columns), rows, names=data.names) + more
