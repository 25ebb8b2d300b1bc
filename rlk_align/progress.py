"""Progress of long work, on stderr: a live line on a terminal, a line per stage elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

from rlk_align.text import printable

Progress = Callable[[str, int, int], None]
"""Receives the progress of long work: (stage, done, total); total is 0 if nothing is counted."""


def silent(_stage: str, _done: int, _total: int) -> None:
    """Discards the progress."""


REPEATED = 20.0
"""Seconds after which a log is told how far a stage has come."""


@contextmanager
def show_progress(name: str) -> Iterator[Progress]:
    """Shows what is told for as long as the context is entered: on a terminal at once, in a log
    each stage as it begins, and again where it takes long."""
    console = Console(stderr=True, highlight=False)
    started = time.monotonic()
    last, told = "", started

    def line(stage: str, done: int, total: int) -> str:
        count = f" {done}/{total}" if total else ""
        words = escape(f"{name}: {printable(stage)}{count}")
        return f"[dim]{time.monotonic() - started:6.1f}s[/dim] {words}"

    if console.is_terminal:
        with console.status("") as status:
            yield lambda stage, done, total: status.update(line(stage, done, total))
        return

    def tell(stage: str, done: int, total: int) -> None:
        nonlocal last, told
        now, begins = time.monotonic(), stage != last
        if begins or now - told >= REPEATED:
            last, told = stage, now
            console.print(line(stage, done, 0 if begins else total), soft_wrap=True)

    yield tell
