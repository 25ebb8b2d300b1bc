"""Which process is stuck, by the heartbeats of imaginary and of real processes."""

import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlk_align.engines.process.heartbeat import INTERVAL, Heartbeat, heartbeats, start, stuck


def heartbeat(name: str, still: float, waiting: bool, silent: float = 0.0) -> Heartbeat:
    return Heartbeat(name, 1, time.monotonic() - silent, still, waiting, "here")


def names(found: list[Heartbeat]) -> list[str]:
    return [p.name for p in found]


def test_nobody_is_stuck_while_all_move() -> None:
    assert stuck([], 1) == []
    assert stuck([heartbeat("a", 9, False), heartbeat("b", 0, True)], 10) == []


def test_a_process_that_waits_is_not_to_blame() -> None:
    found = [
        heartbeat("rank 0", 11, True),
        heartbeat("rank 1", 3, False),
        heartbeat("rank 2", 11, True),
    ]
    assert names(stuck(found, 10)) == ["rank 1"]


def test_if_all_processes_wait_all_are_named() -> None:
    found = [heartbeat("rank 0", 11, True), heartbeat("rank 1", 12, True)]
    assert names(stuck(found, 10)) == ["rank 0", "rank 1"]


def test_a_stuck_process_is_blamed_before_a_moving_one() -> None:
    found = [heartbeat("rank 0", 2, False), heartbeat("rank 1", 12, False)]
    assert names(stuck(found, 10)) == ["rank 1"]


def test_silence_counts() -> None:
    found = [heartbeat("rank 0", 5, True), heartbeat("rank 1", 1, True, silent=30 * INTERVAL)]
    assert names(stuck(found, 10)) == ["rank 1"]


def test_a_process_that_has_ended_is_not_stuck() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    ended = Heartbeat("rank 1", child.pid, time.monotonic() - 99, 0.0, False, "its end")
    assert stuck([heartbeat("rank 0", 1, False), ended], 10) == []


def test_a_heartbeat_keeps_nothing_of_the_functions_that_it_saw(tmp_path: Path) -> None:
    start(tmp_path, "rank 0")

    def hold() -> weakref.ref[set[int]]:
        held: set[int] = set()
        while not any("in hold" in beat.where for beat in heartbeats(tmp_path)):
            time.sleep(INTERVAL / 10)
        return weakref.ref(held)

    assert hold()() is None


PROGRAM = """
import sys, time
from pathlib import Path
from rlk_align.engines.process import heartbeat
heartbeat.start(Path(sys.argv[1]), "rank 7")
def stand(): time.sleep(60)
def work(n): return [str(k) for k in range(n)]
def more(n): return {k: work(k % 7) for k in range(n)}
def move():
    while True: sum(map(len, work(50))), more(40), sorted(work(99))
{"stand": stand, "move": move}[sys.argv[2]]()
"""


@pytest.fixture
def process(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), request.param]
    child = subprocess.Popen(command)
    yield child
    child.kill()
    child.wait()


def seen(folder: Path, enough: float) -> Heartbeat:
    """The heartbeat after `enough` seconds without progress, or after ten seconds."""
    deadline = time.monotonic() + 10
    found: list[Heartbeat] = []
    while time.monotonic() < deadline:
        found = heartbeats(folder)
        if found and found[0].stood_still >= enough:
            break
        time.sleep(0.1)
    assert names(found) == ["rank 7"]
    return found[0]


@pytest.mark.parametrize("process", ["stand"], indirect=True)
def test_a_process_that_stands_says_where(process: subprocess.Popen, tmp_path: Path) -> None:
    found = seen(tmp_path, 1.5)
    assert found.stood_still >= 1.5
    assert found.where.endswith("in stand")
    assert (found.pid, found.waiting, found.stopped) == (process.pid, False, False)


@pytest.mark.parametrize("process", ["move"], indirect=True)
def test_a_process_that_moves_does_not_stand(process: subprocess.Popen, tmp_path: Path) -> None:
    time.sleep(3)
    assert seen(tmp_path, 0.0).stood_still < 2


@pytest.mark.parametrize("process", ["move"], indirect=True)
def test_a_stopped_process_is_silent(process: subprocess.Popen, tmp_path: Path) -> None:
    seen(tmp_path, 0.0)
    process.send_signal(signal.SIGSTOP)
    assert seen(tmp_path, 3.0).stood_still >= 3.0


def test_a_folder_that_goes_away_does_not_end_the_process(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    start(tmp_path / "file" / "alive", "x")
    time.sleep(2 * INTERVAL)
    assert heartbeats(tmp_path / "file") == []
