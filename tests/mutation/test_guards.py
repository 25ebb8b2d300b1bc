"""Each guard of a verdict, taken out in turn: the tests must notice.

A copy of the package is changed in one line, and the tests of verdicts and comparisons are run
against the copy.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rlk_align

ROOT = Path(__file__).parent.parent.parent
WITNESSES = [f"tests/align/test_{name}.py" for name in ("verdict", "comparison", "divergence")]

GUARDS = {
    "precheck stops": (
        "comparison.py",
        "if all(m.kind in allowed for m in mismatches):",
        "if True:",
    ),
    "precheck is inconclusive": (
        "results.py",
        "return any(m.kind not in self.allowed for m in self.mismatches)",
        "return False",
    ),
    "observer": ("verdict.py", 'c.controls.observer == "violated"', "False"),
    "coverage": (
        "verdict.py",
        "if not paired >= contract.min_coverage * expected or not paired:",
        "if False:",
    ),
    "too few tokens": (
        "verdict.py",
        "if not edge.metrics.tokens >= contract.min_tokens:",
        "if False:",
    ),
    "missing rows": ("verdict.py", "if not explained", "if False"),
    "NaN in a metric": ("verdict.py", "if value <= limit.fail:", "if not value > limit.fail:"),
    "NaN in a row": (
        "verdict.py",
        "[_nonfinite(edge, s) for s in edge.sites if s.nonfinite]",
        "[]",
    ),
    "noise proves nothing": ("divergence.py", "& ~noisy[paired.number]", ""),
}


def witnesses_pass(package: Path) -> bool:
    """Whether the tests pass against the `rlk_align` that lies in `package`."""
    done = subprocess.run(
        # -P: the checkout itself must not come before the copy.
        [sys.executable, "-P", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *WITNESSES],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.returncode == 0


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    source = Path(rlk_align.__file__).parent
    shutil.copytree(
        source, tmp_path / "rlk_align", ignore=shutil.ignore_patterns("__pycache__", "data")
    )
    for folder in ("contracts", "fixtures"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    return tmp_path


def test_the_witnesses_pass_as_things_are(copy: Path) -> None:
    assert witnesses_pass(copy)


@pytest.mark.parametrize("guard", GUARDS)
def test_a_missing_guard_is_noticed(copy: Path, guard: str) -> None:
    name, line, without = GUARDS[guard]
    path = copy / "rlk_align" / name
    text = path.read_text(encoding="utf-8")
    assert text.count(line) == 1, f"{name} no longer holds the guard as it is written here"
    path.write_text(text.replace(line, without), encoding="utf-8")
    assert not witnesses_pass(copy)
