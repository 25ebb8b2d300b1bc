"""What the parent tells a worker, and what the worker tells the parent."""

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
    """The key of everything that decides what the trace holds."""
    prompts: Path
    """Prompts; tokenised by every side for the parity precheck."""
    tokens: Path | None
    """The sequences to score; None where this engine samples them."""
    passes: tuple[str, ...]
    """`decode` or `prefill`, alone (tapped), or with a suffix: `.untapped`, `.repeat`
    (tapped, digests only), `.production`, or another one for an intervention."""
    interventions: dict[str, Intervention] = {}
    """Interventions by pass; a decode pass among them is given the tokens that were sampled."""
    max_new_tokens: int
    seed: int
    budget: int
    layers: tuple[int, int] | None
    sites: tuple[str, ...]
    then: tuple["Job", ...] = ()
    """What the engine does next, loaded once: jobs that differ in their fault, their seed and their
    tokens alone."""

    @property
    def timeout(self) -> float:
        """Seconds for which processes may stand still."""
        return float(self.engine.option("timeout") or 0)


class Events:
    """A file of JSON lines by which a worker reports its progress and its error.

    All ranks write it, each line at once.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "events.jsonl"
        self._read = 0

    def send(self, **event: Any) -> None:
        with self._path.open("ab", buffering=0) as file:
            file.write(json.dumps(event).encode() + b"\n")

    def send_error(self, error: RlkError, rank: int | None = None) -> None:
        """`rank`: whose error it is, for the launcher to judge; None is the worker's last word."""
        # An engine from elsewhere may raise a kind of its own.
        name = next(c.__name__ for c in type(error).__mro__ if c.__name__ in ERRORS)
        self.send(error=name, message=error.message, fix=error.fix, rank=rank)

    def unread(self) -> list[dict[str, Any]]:
        """What was sent since this was last asked, in order."""
        if not self._path.is_file():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def error_of(event: dict[str, Any]) -> RlkError:
    """The error that an event tells of."""
    return ERRORS[event["error"]](event["message"], event["fix"])


_LONGEST = 300
"""Characters of a line of output that are shown; engines print whole configurations in one."""


def failed(what: str, log: Path, hint: str = "", pid: int | None = None) -> EngineFailed:
    """The error for a process that failed: what happened, and the end of its output, indented.

    `pid`: whose lines are wanted, where processes share a log and say in it who they are.
    """
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    lines = [line for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if f"pid={pid})" in line] or lines or ["(no output)"]
    shown = "\n".join(f"  {line[:_LONGEST]}" for line in lines[-15:])
    return EngineFailed(
        f"{what}; the last lines of {log.name}:\n{shown}",
        f"{hint}{'; ' if hint else ''}the whole log: {log}; finished passes are kept, and a rerun "
        "continues from there",
    )
