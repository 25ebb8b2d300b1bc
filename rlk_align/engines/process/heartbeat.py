"""Whether a process of an engine still makes progress: written by itself, read by the parent.

A thread of each process notes for how long the main thread has stood at one and the same
instruction, and whether that is inside a wait for others. Needs no torch.
"""

import atexit
import json
import os
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

HEARTBEATS = "heartbeats"
"""Their folder, in a capture's."""
INTERVAL = 0.5
"""Seconds between two notes."""

_WAITS = (
    "torch/distributed/",
    "multiprocessing/",
    "concurrent/futures/",
    "selectors.py",
    "subprocess.py",
)
"""Parts of the paths of code that waits for another process, beside an engine's own."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a process last said of itself."""

    name: str
    """`rank 1`, or `the engine`."""
    pid: int
    written: float
    """Seconds of the machine's monotonic clock."""
    still: float
    """Seconds that the main thread had then not moved."""
    waiting: bool
    """Whether it stood in a wait for other processes."""
    where: str
    """`file:line in function`, and from where torch was called, if that is inside torch."""

    @property
    def stood_still(self) -> float:
        """Seconds without a sign of life: a stopped process does not even write."""
        silent = time.monotonic() - self.written
        return self.still + (silent if silent > 4 * INTERVAL else 0.0)

    @property
    def ended(self) -> bool:
        """Whether the process is gone: its launcher says how it ended."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False

    @property
    def stopped(self) -> bool:
        return time.monotonic() - self.written > 10 * INTERVAL


def start(folder: Path, name: str, waits: tuple[str, ...] = ()) -> None:
    """Notes this process's heartbeat in `folder` from now on, from a thread of its own.

    `waits`: `EngineInfo.waits`.
    """
    main = threading.get_ident()
    ended = threading.Event()
    thread = threading.Thread(
        target=_note, args=(folder, name, main, ended, (*_WAITS, *waits)), daemon=True
    )
    thread.start()

    def end() -> None:
        # A thread that still runs while the interpreter is taken down can abort the process.
        ended.set()
        thread.join()

    atexit.register(end)


def _note(
    folder: Path, name: str, main: int, ended: threading.Event, waits: tuple[str, ...]
) -> None:
    path = folder / f"{name.replace(' ', '-')}.json"
    last: tuple[tuple[int, int], ...] = ()
    since = time.monotonic()
    while not ended.is_set():
        frame = sys._current_frames().get(main)
        stack = list(traceback.walk_stack(frame))
        position = tuple((id(f.f_code), f.f_lasti) for f, _ in stack)
        now = time.monotonic()
        if position != last:
            last, since = position, now
        files = [f.f_code.co_filename for f, _ in stack]
        heartbeat = Heartbeat(
            name,
            os.getpid(),
            now,
            now - since,
            any(part in file for file in files[:3] for part in waits),
            _place(stack),
        )
        partial = path.with_suffix(f".{os.getpid()}")
        try:
            folder.mkdir(exist_ok=True)
            partial.write_text(json.dumps(asdict(heartbeat)), encoding="utf-8")
            os.replace(partial, path)
        except OSError:
            # The disk is full or the folder is gone: the pass will say so in its own words.
            ended.wait(INTERVAL)
        ended.wait(INTERVAL)


def _place(stack: list) -> str:
    if not stack:
        return "its end"
    places = [f"{f.f_code.co_filename}:{line} in {f.f_code.co_name}" for f, line in stack]
    caller = next((place for place in places if "/torch/" not in place), places[0])
    return places[0] if caller == places[0] else f"{places[0]}, from {caller}"


def heartbeats(folder: Path) -> list[Heartbeat]:
    """The heartbeat of every process that has written one."""
    beats = []
    for path in sorted(folder.glob("*.json")):
        try:
            beats.append(Heartbeat(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):
            continue
    return beats


def stuck(beats: list[Heartbeat], timeout: float) -> list[Heartbeat]:
    """The processes that hold the others up: none while all have moved within `timeout`
    seconds; those that wait for others are to blame only where nobody else is."""
    beats = [p for p in beats if not p.ended]
    if all(p.stood_still <= timeout for p in beats):
        return []
    awaited = [p for p in beats if not p.waiting or p.stopped]
    return [p for p in awaited if p.stood_still > timeout] or awaited or beats
