"""dump.json of an imported run: what was read, and what of it is there."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

import pyarrow as pa
from pydantic import Field

from rlk_align.logs.dumps.table import SCHEMA, sequences_of
from rlk_align.trace.records import Record

Count = Annotated[int, Field(ge=0)]


class Source(Record):
    """A file that was read."""

    path: str
    size: Count
    """In bytes."""


class Manifest(Record):
    """dump.json."""

    schema_id: Literal["rlk-align/dump/1"] = "rlk-align/dump/1"
    format: str
    """The reader's name, e.g. `nemo-rl`."""
    framework: str | None = None
    """What wrote the dump, where the format tells."""
    version: str | None = None
    """Version of the framework or of its format, where the dump tells."""
    sources: tuple[Source, ...]
    sequences: Count
    tokens: Count
    """Prompts included."""
    scored: Count
    """Tokens that the loss counts."""
    compared: Count
    """Scored tokens of which both sides recorded a log-prob."""
    rollout_missing: Count
    """Scored tokens without a log-prob of the rollout."""
    train_missing: Count
    """Scored tokens without a log-prob of the trainer."""
    steps: tuple[int, ...] = ()
    """Training steps, ascending; empty where the dump does not say."""
    fields: tuple[str, ...]
    """Columns of the table in which at least one sequence has a value."""
    notes: tuple[str, ...] = ()
    """How the format was understood, e.g. which values stand for missing ones."""
    skipped: tuple[str, ...] = ()
    """What the files hold and the run does not, each with its reason."""


@dataclass
class Findings:
    """What a reader learns of a dump while it yields the sequences."""

    sources: list[Source] = field(default_factory=list)
    version: str | None = None
    notes: dict[str, None] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Adds to `Manifest.notes`, once."""
        self.notes[text] = None

    def skip(self, text: str) -> None:
        """Adds to `Manifest.skipped`."""
        self.skipped.append(text)


@dataclass
class Tally:
    """Counts the batches that pass through it."""

    sequences: int = 0
    tokens: int = 0
    scored: int = 0
    compared: int = 0
    rollout_missing: int = 0
    train_missing: int = 0
    steps: set[int] = field(default_factory=set)
    fields: set[str] = field(default_factory=set)

    def counting(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the batches, and counts each."""
        for batch in batches:
            self._count(batch)
            yield batch

    def manifest(self, format: str, framework: str | None, findings: Findings) -> Manifest:
        """Returns the manifest of what was counted."""
        return Manifest(
            format=format,
            framework=framework,
            version=findings.version,
            sources=tuple(findings.sources),
            sequences=self.sequences,
            tokens=self.tokens,
            scored=self.scored,
            compared=self.compared,
            rollout_missing=self.rollout_missing,
            train_missing=self.train_missing,
            steps=tuple(sorted(self.steps)),
            fields=tuple(name for name in SCHEMA.names if name in self.fields),
            notes=tuple(findings.notes),
            skipped=tuple(findings.skipped),
        )

    def _count(self, batch: pa.RecordBatch) -> None:
        sequences = sequences_of(batch)
        self.sequences += len(sequences)
        self.tokens += sequences.tokens
        self.scored += int(sequences.scored.sum())
        self.compared += int(sequences.compared.sum())
        self.rollout_missing += int((sequences.scored & sequences.rollout_missing).sum())
        self.train_missing += int((sequences.scored & sequences.train_missing).sum())
        self.steps |= {int(step) for step in batch.column("step").unique() if step.is_valid}
        for name in SCHEMA.names:
            column = batch.column(name)
            if column.null_count < len(column):
                self.fields.add(name)
