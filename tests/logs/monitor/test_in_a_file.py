"""The output of `rlk-align monitor` to a file or a pipe while it follows a run."""

import signal
import subprocess
import sys
import time
from pathlib import Path

from imported_runs import imported_run
from simulate_dumps import Dump

SECONDS = 60


def test_a_step_is_in_the_file_before_the_monitor_ends(tmp_path: Path) -> None:
    imported_run(Dump(0, 20_000).sequences_of(), tmp_path / "run")
    out = tmp_path / "out.txt"
    command = [sys.executable, "-m", "rlk_align", "monitor", str(tmp_path / "run")]
    with out.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + SECONDS
        while len(rows := out.read_text().splitlines()) < 7 and time.monotonic() < until:
            time.sleep(0.05)
        assert process.poll() is None, "it follows the run"
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 130
    assert rows[0].split()[:2] == ["step", "tokens"]
    assert [row.split()[0] for row in rows[1:]] == ["0", "1", "2", "3", "4", "5"]
    assert len({row.index("±") for row in rows[1:]}) == 1, "columns lie below one another"
