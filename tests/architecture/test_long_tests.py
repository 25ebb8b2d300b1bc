"""The tests that only the commands with `-all` run exist."""

import subprocess
import sys
from pathlib import Path

import pytest
from long_tests import LONG

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def ids() -> list[str]:
    """The ids of the tests in the files of LONG, from `tests/` on."""
    files = sorted({name.partition("::")[0] for name in LONG})
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "--no-header"]
        + ["-o", "addopts=--import-mode=importlib", *(f"tests/{file}" for file in files)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.removeprefix("tests/") for line in done.stdout.splitlines() if "::" in line]


def test_each_entry_is_the_beginning_of_a_test_s_id(ids: list[str]) -> None:
    assert len(ids) > 2 * len(LONG)
    assert [name for name in LONG if not any(i.startswith(name) for i in ids)] == []
