"""What the parent tells a worker, and what the worker tells the parent."""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict


class Job(BaseModel):
    """job.json in the capture's folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: str
    """The engine spec as text."""
    model: Path
    folder: Path
    """The trace's folder."""
    prompts: Path
    """Prompts; tokenised by every side for the parity precheck."""
    tokens: Path | None
    """The sequences to score; None where this engine samples them."""
    passes: tuple[str, ...]
    """`decode` or `prefill`, alone (tapped), or with a suffix: `.untapped`, `.repeat`
    (tapped, digests only) or `.production`."""
    max_new_tokens: int
    seed: int
    budget: int
    layers: tuple[int, int] | None
    sites: tuple[str, ...]


class Events:
    """A file of JSON lines by which a worker reports its progress and its error."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "events.jsonl"

    def send(self, **event: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")
