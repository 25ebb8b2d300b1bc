"""Whether a process of an engine makes progress: the process writes its heartbeat, and the parent
reads it.

A thread of each process records for how long the main thread has been at the same instruction, and
whether that is inside a wait for other processes. This module does not import torch.
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
"""The name of their folder in a capture's folder."""
INTERVAL = 0.5
"""Seconds between two heartbeats."""

_WAITS = (
    "torch/distributed/",
    "multiprocessing/",
    "concurrent/futures/",
    "selectors.py",
    "subprocess.py",
)
"""Substrings of the paths of code that waits for another process; an engine has further ones."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The last heartbeat that a process wrote."""

    name: str
    """`rank 1`, or `the engine`."""
    pid: int
    written: float
    """The time of writing, in seconds of the machine's monotonic clock."""
    still: float
    """For how many seconds the main thread had not moved."""
    waiting: bool
    """Whether it was waiting for other processes."""
    where: str
    """`file:line in function`, and the caller outside torch if that is inside torch."""

    @property
    def stood_still(self) -> float:
        """Seconds without progress; a stopped process does not even write heartbeats."""
        silent = time.monotonic() - self.written
        return self.still + (silent if silent > 4 * INTERVAL else 0.0)

    @property
    def ended(self) -> bool:
        """Whether the process has ended; its launcher reports how."""
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
    """Starts a thread that writes this process's heartbeat to `folder`.

    `waits`: `EngineInfo.waits`.
    """
    main = threading.get_ident()
    ended = threading.Event()
    thread = threading.Thread(
        target=_write_heartbeats, args=(folder, name, main, ended, (*_WAITS, *waits)), daemon=True
    )
    thread.start()

    def end() -> None:
        # A thread that still runs during the interpreter's teardown can abort the process.
        ended.set()
        thread.join()

    atexit.register(end)


def _write_heartbeats(
    folder: Path, name: str, main: int, ended: threading.Event, waits: tuple[str, ...]
) -> None:
    path = folder / f"{name.replace(' ', '-')}.json"
    last: tuple[tuple[int, int], ...] = ()
    since = time.monotonic()
    while not ended.is_set():
        position, files, where = _place(main)
        now = time.monotonic()
        if position != last:
            last, since = position, now
        heartbeat = Heartbeat(
            name,
            os.getpid(),
            now,
            now - since,
            any(part in file for file in files[:3] for part in waits),
            where,
        )
        partial = path.with_suffix(f".{os.getpid()}")
        try:
            folder.mkdir(exist_ok=True)
            partial.write_text(json.dumps(asdict(heartbeat)), encoding="utf-8")
            os.replace(partial, path)
        except OSError:
            # The disk is full or the folder is gone: the pass itself reports that.
            ended.wait(INTERVAL)
        ended.wait(INTERVAL)


def _place(thread: int) -> tuple[tuple[tuple[int, int], ...], list[str], str]:
    """The instructions at which a thread is, innermost first, their files, and the place in words.
    No frame outlives the call: it would keep all that the thread's functions hold."""
    stack = list(traceback.walk_stack(sys._current_frames().get(thread)))
    position = tuple((id(f.f_code), f.f_lasti) for f, _ in stack)
    return position, [f.f_code.co_filename for f, _ in stack], _location(stack)


def _location(stack: list) -> str:
    if not stack:
        return "its end"
    calls = [f"{f.f_code.co_filename}:{line} in {f.f_code.co_name}" for f, line in stack]
    caller = next((call for call in calls if "/torch/" not in call), calls[0])
    return calls[0] if caller == calls[0] else f"{calls[0]}, from {caller}"


def heartbeats(folder: Path) -> list[Heartbeat]:
    """The heartbeat of each process that has written one."""
    beats = []
    for path in sorted(folder.glob("*.json")):
        try:
            beats.append(Heartbeat(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):
            continue
    return beats


def stuck(beats: list[Heartbeat], timeout: float) -> list[Heartbeat]:
    """The processes that hold up the others; none if all have moved within `timeout` seconds. A
    process that waits for others is returned only if no other process is to blame."""
    beats = [p for p in beats if not p.ended]
    if all(p.stood_still <= timeout for p in beats):
        return []
    awaited = [p for p in beats if not p.waiting or p.stopped]
    return [p for p in awaited if p.stood_still > timeout] or awaited or beats
