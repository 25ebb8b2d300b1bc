"""The conclusions of a run: they do not need the captures' values, and a command that fails leaves
none of an earlier one."""

import shutil
from pathlib import Path

import pytest
from inprocess import command
from synthetic import CONTRACT, compared_run

from rlk_align import pipeline
from rlk_align.capture.request import CaptureRequest
from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import CorruptTrace, EngineFailed, Interrupted
from rlk_align.trace.checksums import CHECKSUMS
from rlk_align.trace.reader import Trace
from rlk_align.trace.run import Run


@pytest.fixture
def lean(tmp_path: Path) -> Path:
    """A run's conclusions and its captures' checksums.json, as docs/ci.md copies them."""
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


@pytest.fixture
def concluded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run folder with the conclusions of an earlier compare, and its captures."""
    monkeypatch.chdir(tmp_path)
    run = compared_run(tmp_path / "run")
    captures = run.folder / "captures"
    monkeypatch.setattr(pipeline, "capture", lambda _, role, *rest: Trace(captures / role))
    return run


def compare(run: Run) -> None:
    side = CaptureRequest(engine=EngineSpec("hf"), model="m", prompts=Path("p"))
    request = pipeline.CompareRequest(rollout=side, train=side, command=("rlk-align", "compare"))
    pipeline.compare(request, run, lambda *_: None)


@pytest.mark.parametrize("stage", ["capture", "measure"])
def test_a_compare_that_fails_leaves_nothing_to_judge(
    concluded: Run, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    def fail(*_: object) -> None:
        raise EngineFailed("it died")

    monkeypatch.setattr(pipeline, stage, fail)
    with pytest.raises(EngineFailed):
        compare(concluded)
    assert not (concluded.folder / "verdict.json").exists()
    with pytest.raises(CorruptTrace, match="did not finish"):
        Run.open(str(concluded.folder))


def test_an_interrupt_while_comparing_says_what_is_kept(
    concluded: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "measure", interrupt)
    with pytest.raises(Interrupted, match=r"what was finished is kept in .*run") as raised:
        compare(concluded)
    assert "continues from there" in raised.value.fix
