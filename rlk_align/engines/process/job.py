"""The job that the parent gives to a worker, and the events that the worker reports."""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from rlk_align.engines.common.intervention import Intervention
from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import ERRORS, EngineFailed, RlkError


class Job(BaseModel):
    """job.json in the capture's folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: EngineSpec
    """In canonical form."""
    model: Path
    folder: Path
    """The trace's folder."""
    key: str
    """A digest of everything that affects the contents of the trace."""
    prompts: Path
    """The prompts; each side tokenises them for the parity check."""
    tokens: Path | None
    """The sequences to score; None if this engine samples them."""
    passes: tuple[str, ...]
    """`decode` or `prefill`, alone (tapped), or with a suffix: `.untapped`, `.repeat`
    (tapped, digests only), `.production`, or another one for an intervention."""
    interventions: dict[str, Intervention] = {}
    """Interventions by pass; their decode passes are forced to the tokens of `tokens`."""
    max_new_tokens: int
    seed: int
    budget: int
    layers: tuple[int, int] | None
    sites: tuple[str, ...]
    modules: bool = False
    """Whether the model, of any family, is observed module by module."""
    then: tuple["Job", ...] = ()
    """Further jobs for the loaded engine, which differ only in their fault, seed and tokens."""

    @property
    def timeout(self) -> float:
        """Seconds without progress after which the engine's processes are ended."""
        return float(self.engine.option("timeout") or 0)


class Events:
    """A file of JSON lines in which a worker reports its progress and its error.

    All ranks write to it, each line in one write.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "events.jsonl"
        self._read = 0

    def send(self, **event: Any) -> None:
        with self._path.open("ab", buffering=0) as file:
            file.write(json.dumps(event).encode() + b"\n")

    def send_error(self, error: RlkError, rank: int | None = None) -> None:
        """`rank`: the rank that failed, for the launcher to consider; None for the final error."""
        # A third-party engine may raise its own subclass.
        name = next(c.__name__ for c in type(error).__mro__ if c.__name__ in ERRORS)
        self.send(error=name, message=error.message, fix=error.fix, rank=rank)

    def unread(self) -> list[dict[str, Any]]:
        """The events since the last call, in order."""
        if not self._path.is_file():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def error_of(event: dict[str, Any]) -> RlkError:
    """The error that an event reports."""
    return ERRORS[event["error"]](event["message"], event["fix"])


_LINE = 300
"""The number of characters shown of a line of output; engines print whole configurations in one."""


def failed(what: str, log: Path, hint: str = "", pid: int | None = None) -> EngineFailed:
    """The error for a process that failed: what happened, and the last lines of its log.

    `pid`: the process whose lines to show, if processes share a log and prefix their lines.
    """
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    lines = [line for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if f"pid={pid})" in line] or lines or ["(no output)"]
    shown = "\n".join(f"  {line[:_LINE]}" for line in lines[-15:])
    return EngineFailed(
        f"{what}; the last lines of {log.name}:\n{shown}",
        f"{hint}{'; ' if hint else ''}the whole log: {log}; finished passes are kept, and a rerun "
        "continues from there",
    )
