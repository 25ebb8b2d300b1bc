"""How a worker's processes are ended."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlk_align.capture import supervise

RANK = """
import pathlib, signal, sys, time
def end(*_):
    time.sleep(0.5)
    pathlib.Path("cleaned").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, end if sys.argv[1] == "ends" else signal.SIG_IGN)
pathlib.Path("ready").touch()
time.sleep(60)
"""
LEADER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]])
time.sleep(60)
"""


def worker(folder: Path, rank: str) -> subprocess.Popen:
    """A leader that SIGTERM kills at once, and its rank."""
    command = [sys.executable, "-c", LEADER, RANK, rank]
    process = subprocess.Popen(command, cwd=folder, start_new_session=True)
    until = time.monotonic() + 30
    while not (folder / "ready").exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    return process


def test_a_rank_has_time_to_end_once_its_leader_is_gone(tmp_path: Path) -> None:
    process = worker(tmp_path, "ends")
    began = time.monotonic()
    supervise._end_group(process)
    assert (tmp_path / "cleaned").exists()
    assert time.monotonic() - began < supervise.GRACE, "it waits no longer than needed"
    assert not supervise._runs(process.pid)


def test_a_rank_that_does_not_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "GRACE", 0.5)
    process = worker(tmp_path, "stays")
    supervise._end_group(process)
    assert not supervise._runs(process.pid)
    assert not (tmp_path / "cleaned").exists()


def test_a_group_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    process.wait()
    began = time.monotonic()
    supervise._end_group(process)
    assert time.monotonic() - began < 1
