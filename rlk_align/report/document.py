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
    """A labelled statement."""

    label: str
    text: str
    tone: Tone = ""


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
    items: Sequence[str] = ()
    """Entries of a list."""
    facts: Sequence[Fact] = ()
    tone: Tone = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A report: a status, a sentence, what the verdict rests on, sections, and what to do next."""

    status: Status
    headline: str
    folder: str
    """Where the run is; empty for a report on several runs."""
    facts: Sequence[Fact]
    """What the verdict rests on."""
    sections: Sequence[Section]
    next_step: str = ""
    """What to do, or a command."""
