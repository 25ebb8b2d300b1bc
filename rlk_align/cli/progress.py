"""Progress on stderr: a live line on a terminal, a line per stage elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

from rlk_align.config import Report


@contextmanager
def progress(name: str) -> Iterator[Report]:
    """A reporter of (stage, done, total) for as long as the context is entered."""
    console = Console(stderr=True, highlight=False)
    started = time.monotonic()
    last = ""

    def line(stage: str, done: int, total: int) -> str:
        count = f" {done}/{total}" if total else ""
        return (
            f"[dim]{time.monotonic() - started:6.1f}s[/dim] {escape(name)}: {escape(stage)}{count}"
        )

    if console.is_terminal:
        with console.status("") as status:
            yield lambda stage, done, total: status.update(line(stage, done, total))
        return

    def report(stage: str, done: int, total: int) -> None:
        nonlocal last
        if stage != last:
            last = stage
            console.print(line(stage, 0, 0), soft_wrap=True)

    yield report
