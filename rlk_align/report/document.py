"""What a report says, before it is text: each subject makes one document, and each format renders
documents in one way. Texts are plain; the renderers escape them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlk_align.judge.verdict import Status

Tone = Literal["", "soft", "doubt", "breach"]


@dataclass(frozen=True, slots=True)
class Fact:
    """A labelled statement; without a label it adds to the one before."""

    label: str
    text: str
    tone: Tone = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An entry of a list: what it is about, what is said of that, and details."""

    title: str = ""
    text: str
    details: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DataTable:
    """Rows of names and figures."""

    name: str
    """Unique in its document."""
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 1
    """How many of the first columns hold names; the others hold figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What stands under one heading."""

    heading: str
    text: Sequence[str] = ()
    """Paragraphs."""
    table: DataTable | None = None
    items: Sequence[Entry | str] = ()
    """Entries of a list; a text is an entry without details."""
    facts: Sequence[Fact] = ()
    tone: Tone = ""

    @property
    def entries(self) -> list[Entry]:
        return [Entry(text=x) if isinstance(x, str) else x for x in self.items]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A report: a status, a sentence, what the verdict rests on, sections, and what to do next."""

    status: Status
    headline: str
    text: str = ""
    """What the headline rests on, in more words."""
    folder: str
    """Where the run is; empty for a report on several runs."""
    facts: Sequence[Fact]
    """What the verdict rests on."""
    sections: Sequence[Section]
    next_steps: Sequence[str] = ()
    """What to do, the most important first."""
    command: str = ""
    """The command that made the run, for readers who do not sit where it ran."""
