"""A document as Markdown, for a pull request.

Below 64 KB whatever the run, for a forge takes no longer comment: lists and tables are cut and
their rest is counted, and sections that do not fit are left out by name.
"""

from collections.abc import Iterable, Iterator, Sequence

from rlk_align.report.document import DataTable, Document, Fact, Section
from rlk_align.report.markup import prose, table
from rlk_align.report.words import bounded

LARGEST = 64_000
"""Bytes of a comment."""
_SHOWN = 50
"""Entries of a list, and rows of a table, that are shown; the rest is counted."""


def document_markdown(document: Document) -> str:
    """Renders a document."""
    text = "\n\n".join(_head(document)) + "\n"
    omitted = []
    for section in document.sections:
        part = "\n" + "\n\n".join(_section(section)) + "\n"
        # Room for the names of what is left out.
        if len((text + part).encode()) <= LARGEST - 1000:
            text += part
        else:
            omitted.append(section.heading)
    if omitted:
        text += f"\nLeft out because they are too long: {', '.join(omitted)}.\n"
    return text


def _head(document: Document) -> Iterator[str]:
    yield f"## rlk-align: {document.status.upper()}"
    yield f"**{prose(document.headline)}**"
    step = [Fact("next", document.next_step)] if document.next_step else []
    if facts := [*step, *document.facts]:
        yield _facts(facts)


def _facts(facts: Iterable[Fact]) -> str:
    return "\n".join(f"- **{prose(fact.label)}:** {prose(fact.text)}" for fact in facts)


def _section(section: Section) -> Iterator[str]:
    yield f"### {prose(section.heading)}"
    yield from map(prose, section.text)
    if section.table is not None:
        yield _table(section.table)
    if section.items:
        yield _bullets(section.items)
    if section.facts:
        yield _facts(section.facts)


def _bullets(items: Sequence[str]) -> str:
    return "\n".join(f"- {prose(item)}" for item in bounded(items, _SHOWN))


def _table(data: DataTable) -> str:
    rows = [[prose(cell, starts_line=False) for cell in row] for row in data.rows[:_SHOWN]]
    more = f"\n\nand {len(data.rows) - _SHOWN} more" if len(data.rows) > _SHOWN else ""
    return table(list(data.columns), rows, names=data.names) + more
