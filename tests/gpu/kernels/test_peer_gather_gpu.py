"""The gather by stores between two processes on one GPU, and on two where there are two: its bench
says what holds."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "kernels" / "bench" / "peer_gather.py"


def test_bits_are_those_of_torch_and_a_killed_rank_is_named(tmp_path):
    out = tmp_path / "peer.json"
    run = (sys.executable, str(SCRIPT), "--seconds", "110", "--out", str(out))
    done = subprocess.run(run, capture_output=True, text=True, timeout=140)
    assert done.returncode == 0, done.stdout + done.stderr
    for result in json.loads(out.read_text()):
        assert result["bits of calls"]["calls"] >= 100
        assert result["bits of graphs"]["captured calls"] >= 100
