"""Shows the progress of long work on stderr: as a live line on a terminal; elsewhere as a line for
each stage, repeated while a stage lasts."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

from rlk_align.text import printable

Progress = Callable[[str, int, int], None]
"""Receives the progress of long work: (stage, done, total); total is 0 if nothing is counted."""

SIGN_OF_LIFE = 20.0
"""Seconds after which a stage is printed again where stderr is not a terminal."""


def silent(_stage: str, _done: int, _total: int) -> None:
    """Discards the progress."""


def labelled(progress: Progress, what: str) -> Progress:
    """Returns the progress of a part of the work, which prefixes the names of stages."""
    return lambda stage, done, total: progress(f"{what}: {stage}", done, total)


@contextmanager
def show_progress(name: str) -> Iterator[Progress]:
    """Yields a function that shows progress until the context ends."""
    console = Console(stderr=True, highlight=False)
    started = time.monotonic()

    def line(stage: str, done: int, total: int) -> str:
        count = f" {done}/{total}" if total else ""
        words = escape(f"{name}: {printable(stage)}{count}")
        return f"[dim]{time.monotonic() - started:6.1f}s[/dim] {words}"

    if console.is_terminal:
        with console.status("") as status:
            yield lambda stage, done, total: status.update(line(stage, done, total))
        return

    last = ("", 0, 0)
    printed, ended = threading.Event(), threading.Event()

    def show(stage: str, done: int, total: int) -> None:
        nonlocal last
        if stage != last[0]:
            console.print(line(stage, 0, 0), soft_wrap=True)
            printed.set()
        last = stage, done, total

    def repeat() -> None:
        while not ended.is_set():
            if printed.wait(SIGN_OF_LIFE):
                printed.clear()
            elif last[0] and not ended.is_set():
                console.print(line(f"still {last[0]}", *last[1:]), soft_wrap=True)

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield show
    finally:
        ended.set()
        printed.set()
        thread.join()
