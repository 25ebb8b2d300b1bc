"""A run whose captures' values stay where they were made: what was concluded stands without."""

import shutil
from pathlib import Path

import pytest
from inprocess import command
from synthetic import CONTRACT, compared_run

from rlk_align.errors import CorruptTrace
from rlk_align.trace.checksums import CHECKSUMS
from rlk_align.trace.run import Run


@pytest.fixture
def lean(tmp_path: Path) -> Path:
    """A run's conclusions and its captures' checksums.json, as docs/ci.md takes them along."""
    run = compared_run(tmp_path / "run").folder
    for pattern in ("*.json", "comparison.parquet", f"captures/*/{CHECKSUMS}"):
        for path in run.glob(pattern):
            to = tmp_path / "lean" / path.relative_to(run)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, to)
    return tmp_path / "lean"


def test_the_gate_judges_it(lean: Path) -> None:
    assert len([p for p in lean.rglob("*") if p.is_file()]) == 7
    code, said = command("gate", lean, "--contract", CONTRACT)
    assert code == 0, said


def test_nothing_can_be_derived_from_it_again(lean: Path) -> None:
    code, said = command("gate", lean, "--recompute", "--contract", CONTRACT)
    assert code == 3
    assert "trace.json is missing" in said


def test_a_part_of_a_capture_is_no_whole_one(lean: Path) -> None:
    (lean / "captures" / "train" / "trace.json").write_text("{}")
    with pytest.raises(CorruptTrace, match=r"train/trace\.json has 2 bytes"):
        Run.open(str(lean)).check()


def test_the_list_of_a_captures_files_is_needed(lean: Path) -> None:
    (lean / "captures" / "train" / CHECKSUMS).unlink()
    with pytest.raises(CorruptTrace, match="its train capture"):
        Run.open(str(lean)).check()
