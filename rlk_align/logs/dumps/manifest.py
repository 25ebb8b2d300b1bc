"""dump.json of an imported run: the files that were read, and their content."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pyarrow as pa
from pydantic import Field

from rlk_align.logs.dumps.table import SCHEMA, sequences_of
from rlk_align.trace.records import Record

Count = Annotated[int, Field(ge=0)]


class SourceFile(Record):
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
    """The framework that wrote the dump; None if the format does not state it."""
    version: str | None = None
    """The version of the framework or of its format; None if the dump does not state it."""
    sources: tuple[SourceFile, ...]
    sequences: Count
    tokens: Count
    """Prompts included."""
    scored: Count
    """Tokens that the loss counts."""
    compared: Count
    """Scored tokens for which both sides recorded a log-prob."""
    rollout_missing: Count
    """Scored tokens without a log-prob of the rollout."""
    train_missing: Count
    """Scored tokens without a log-prob of the trainer."""
    steps: tuple[int, ...] = ()
    """Training steps, ascending; empty if the dump does not state them."""
    fields: tuple[str, ...]
    """Columns of the table in which at least one sequence has a value."""
    notes: tuple[str, ...] = ()
    """How the format was read, e.g. which values count as missing."""
    skipped: tuple[str, ...] = ()
    """The parts of the files that are not in the run, each with the reason."""


@dataclass
class Findings:
    """The facts that a reader collects about a dump while it yields the sequences."""

    sources: list[SourceFile] = field(default_factory=list)
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
    """Counts the content of batches."""

    counts: Counter[str] = field(default_factory=Counter)
    """Field of Manifest -> its count."""
    steps: set[int] = field(default_factory=set)
    fields: set[str] = field(default_factory=set)

    def counting(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the batches and counts each."""
        for batch in batches:
            self._count(batch)
            yield batch

    def manifest(self, format: str, framework: str | None, findings: Findings) -> Manifest:
        """Returns the manifest of the batches that were counted."""
        counts: dict[str, Any] = dict(self.counts)
        return Manifest(
            format=format,
            framework=framework,
            version=findings.version,
            sources=tuple(findings.sources),
            **counts,
            steps=tuple(sorted(self.steps)),
            fields=tuple(name for name in SCHEMA.names if name in self.fields),
            notes=tuple(findings.notes),
            skipped=tuple(findings.skipped),
        )

    def _count(self, batch: pa.RecordBatch) -> None:
        sequences = sequences_of(batch)
        scored = sequences.scored
        self.counts.update(
            sequences=len(sequences),
            tokens=sequences.tokens,
            scored=int(scored.sum()),
            compared=int(sequences.compared.sum()),
            rollout_missing=int((scored & sequences.rollout_missing).sum()),
            train_missing=int((scored & sequences.train_missing).sum()),
        )
        self.steps |= {int(step) for step in batch.column("step").unique() if step.is_valid}
        for name in SCHEMA.names:
            column = batch.column(name)
            if column.null_count < len(column):
                self.fields.add(name)
