"""Recordings of other tools, imported and compared by the command line."""

from pathlib import Path
from typing import Any

from command import Cli, Outcome

from rlk_align.data import data_path
from rlk_align.trace.reader import Trace


def imported(cli: Cli, format: str, source: object, out: Path, side: str, *more: object) -> Outcome:
    """Imports the files of one side of the embedded model."""
    return cli(
        *("import", format, source, "-o", out, "--side", side, "--model", data_path("model"), *more)
    )


def trace_of(side: Path, step: int = 0) -> Trace:
    """The trace of an imported step."""
    return Trace(side / f"step-{step:08d}/rank-0")


def beyond(done: Outcome) -> set[tuple[str, str]]:
    """(site, side) of the operators beyond their budgets."""
    assert done.verdict is not None, done.out + done.err
    found: list[dict[str, Any]] = done.verdict["breaches"]
    return {(b["site"], b["side"]) for b in found if b["site"] is not None}


def rejected(done: Outcome) -> str:
    """The message of a request that was refused, without a traceback."""
    assert done.code == 2, (done.code, done.out, done.err)
    assert "Traceback" not in done.err
    return " ".join(done.err.split())
