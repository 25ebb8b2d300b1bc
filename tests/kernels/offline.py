"""Running the programs that need an H200 that is not there (`tests/support/offline_h200.py`)."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(program: str, *arguments: str) -> tuple[int, dict[str, list[str]]]:
    """(exit status, what each line says behind its first word) of a program beside this file, in a
    process where Triton compiles."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(str(ROOT / x) for x in ("kernels", "tests/support"))
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name(program), *arguments],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout, done.stderr
    lines = filter(None, map(str.split, done.stdout.splitlines()))
    return done.returncode, {first: rest for first, *rest in lines}
