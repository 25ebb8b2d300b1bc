"""The commands on dumps import no torch: one process runs them all."""

import json
import subprocess
import sys
from pathlib import Path

from neutral_records import records
from simulate_dumps import healthy

_ALL = """
import sys
from rlk_align.cli.main import app
for command in (
    ["import", "jsonl", "dump.jsonl", "-o", "run"],
    ["explain", "run"],
    ["gate", "run"],
    ["monitor", "--once", "run"],
    ["report", "html", "run", "-o", "page.html"],
):
    try:
        app(command)
        code = 0
    except SystemExit as end:
        code = end.code
    heavy = [name for name in ("torch", "vllm", "transformers") if name in sys.modules]
    print("SPY", command[0], code, heavy)
"""


def test_no_torch_is_imported(tmp_path: Path) -> None:
    lines = [json.dumps(record) + "\n" for record in records(healthy(1, 2_000))]
    (tmp_path / "dump.jsonl").write_text("".join(lines), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", _ALL], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    said = [line[4:] for line in done.stdout.splitlines() if line.startswith("SPY ")]
    commands = ("import", "explain", "gate", "monitor", "report")
    assert said == [f"{name} 0 []" for name in commands], done.stderr
