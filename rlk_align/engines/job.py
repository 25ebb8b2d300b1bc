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
    timeout: float = 600.0
    """Seconds after which ranks no longer wait for each other."""
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
    """A file of JSON lines by which a worker reports its progress and its error.

    All ranks write it; a line is short enough to be written at once.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "events.jsonl"

    def told(self) -> bool:
        """Whether an error has been reported."""
        return self._path.is_file() and '"error"' in self._path.read_text(encoding="utf-8")

    def send(self, **event: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")


def last_lines(log: Path, count: int = 15) -> list[str]:
    """The end of a process's output, indented."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else "(no output)"
    return [f"  {line}" for line in text.splitlines()[-count:]]
