"""The document of a report: each subject makes one document, and each format renders any document.
Its texts are plain; the renderers escape them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlk_align.judge.verdict import Status

Tone = Literal["", "soft", "doubt", "breach"]


@dataclass(frozen=True, slots=True)
class Fact:
    """A labelled statement; one without a label continues the statement before it."""

    label: str
    text: str
    tone: Tone = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An entry of a list: its subject, a statement, and details."""

    title: str = ""
    text: str
    details: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DataTable:
    """A table of names and figures."""

    name: str
    """Unique in its document."""
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 1
    """The number of leading columns with names; the others have figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The content under one heading."""

    heading: str
    text: Sequence[str] = ()
    """Paragraphs."""
    table: DataTable | None = None
    items: Sequence[Entry | str] = ()
    """The entries of a list; a plain text is an entry without details."""
    facts: Sequence[Fact] = ()
    tone: Tone = ""

    @property
    def entries(self) -> list[Entry]:
        return [Entry(text=x) if isinstance(x, str) else x for x in self.items]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A report: a status, a headline, the facts behind the verdict, sections, and the next
    steps."""

    status: Status
    headline: str
    text: str = ""
    """The reasons for the headline."""
    folder: str
    """The run's folder; empty for a report on several runs."""
    facts: Sequence[Fact]
    """The facts behind the verdict."""
    sections: Sequence[Section]
    next_steps: Sequence[str] = ()
    """What the reader should do, the most important step first. A command follows or precedes a
    colon."""
    command: str = ""
    """The command that made the run."""
