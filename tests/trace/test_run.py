"""The RUN folder: how it is found, that it refers to nothing outside, and its lock."""

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError
from synthetic import compared_run, draw, write_trace

from rlk_align.errors import BadOption, CorruptTrace, ToolError, TraceNotWritten
from rlk_align.trace.checksums import CHECKSUMS
from rlk_align.trace.records import writing
from rlk_align.trace.run import Run, RunRecord
from rlk_align.trace.run_folder import RUNS


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def saved(folder: Path, **captures: str) -> Run:
    """A finished run that has only captures."""
    run = Run(folder)
    named = captures or {"capture": "captures/x"}
    for name in named.values():
        inside = folder / name
        if not (inside / CHECKSUMS).exists():
            write_trace(inside, draw())
    run.save(RunRecord(command=["rlk-align", "capture"], captures=named))
    run.finish()
    return Run(folder)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A compared run."""
    return compared_run(tmp_path / "run")


def test_last_is_the_run_that_was_saved_last(tmp_path: Path) -> None:
    saved(tmp_path / "one")
    assert Run.open("@last").folder == tmp_path / "one"
    saved(Path("two"))
    assert Run.open("@last").folder == tmp_path / "two"
    assert Run.open("one").folder == Path("one")


def test_no_last_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=str(tmp_path / RUNS)):
        Run.open("@last")


def test_a_last_run_that_is_gone_is_named(tmp_path: Path) -> None:
    run = saved(tmp_path / "gone")
    (run.folder / "run.json").unlink()
    with pytest.raises(BadOption, match="gone"):
        Run.open("@last")


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for name in ("file", "folder", "nothing", "@first"):
        with pytest.raises(BadOption, match=name):
            Run.open(name)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"command": [], "captures": {"a": 1}}'])
def test_a_damaged_record_is_corrupt(tmp_path: Path, text: str) -> None:
    run = saved(tmp_path / "run")
    (run.folder / "run.json").write_text(text)
    with pytest.raises(CorruptTrace, match=r"run\.json"):
        Run.open("run")
    with pytest.raises(CorruptTrace, match=r"run\.json"):
        _ = run.record


@pytest.mark.parametrize("name", ["/etc", "..", "../other", "captures/../../other", "a/.."])
def test_captures_outside_the_run_are_refused(tmp_path: Path, name: str) -> None:
    run = saved(tmp_path / "run")
    run.save(RunRecord(command=[], captures={"rollout": name, "train": "captures/x"}))
    with pytest.raises(CorruptTrace, match="outside"):
        run.capture_folder("rollout")


def test_a_capture_is_found_by_its_role_or_because_it_is_the_only_one(tmp_path: Path) -> None:
    both = saved(tmp_path / "a", rollout="captures/x", train="captures/y")
    assert both.capture_folder("train") == tmp_path / "a" / "captures" / "y"
    single = saved(tmp_path / "b", capture="captures/z")
    for role in ("rollout", "train", "capture"):
        assert single.capture_folder(role) == tmp_path / "b" / "captures" / "z"
    with pytest.raises(BadOption, match="capture") as error:
        both.capture_folder("capture")
    assert "rollout, train" in error.value.fix


def test_a_comparison_is_kept(run: Run) -> None:
    assert Run.open(str(run.folder)).comparison.tokens == 15
    assert not list(run.folder.glob("*.partial"))


def test_a_single_capture_has_nothing_to_judge(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="single capture"):
        _ = saved(tmp_path / "run").comparison


def test_a_missing_or_damaged_comparison_is_corrupt(run: Run) -> None:
    path = run.folder / "comparison.json"
    text = path.read_text()
    for bad in ("", text[: len(text) // 2], text.replace('"edges"', '"edge"'), "null", text + " "):
        path.write_text(bad)
        with pytest.raises(CorruptTrace, match=r"comparison\.json"):
            _ = run.comparison
    path.unlink()
    with pytest.raises(CorruptTrace, match="missing"):
        _ = run.comparison


def test_a_run_that_did_not_finish_is_not_whole(run: Run) -> None:
    run.invalidate()
    with pytest.raises(CorruptTrace, match="did not finish") as raised:
        Run.open(str(run.folder))
    assert "rlk-align compare" in raised.value.fix


@pytest.mark.parametrize("gone", ["captures/train", "captures"])
def test_a_capture_that_is_gone_is_corrupt(run: Run, gone: str) -> None:
    run.check()
    (run.folder / gone).rename(run.folder / "elsewhere")
    with pytest.raises(CorruptTrace, match=r"train|rollout"):
        run.check()


def test_a_capture_that_was_made_again_is_another(run: Run) -> None:
    other = draw(seed=1)
    shutil.rmtree(run.folder / "captures" / "train")
    write_trace(run.folder / "captures" / "train", other)
    with pytest.raises(CorruptTrace, match=r"train/checksums\.json"):
        run.check()
    with pytest.raises(CorruptTrace, match=r"train/checksums\.json"):
        run.capture_folder("train")


def test_captures_inside_and_outside_are_named_from_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    inside = write_trace(run.folder / "captures" / "rollout-1", draw()).folder
    outside = write_trace(tmp_path / "other" / "captures" / "x", draw()).folder
    names = run.relative({"rollout": inside, "train": outside})
    assert names["rollout"] == "captures/rollout-1"
    run = saved(run.folder, **names)
    assert run.capture_folder("rollout").resolve() == inside
    assert run.capture_folder("train").resolve() == outside


def test_runs_that_are_moved_together_find_each_other(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "else" / "where"
    other = write_trace(old / "a" / "captures" / "x", draw()).folder
    run = Run(old / "compared")
    saved(run.folder, **run.relative({"rollout": other, "train": other}))
    new.parent.mkdir()
    old.rename(new)
    moved = Run.open(str(new / "compared"))
    moved.check()
    assert moved.capture_folder("train").resolve() == new / "a" / "captures" / "x"


def test_a_run_that_encloses_other_runs_finds_their_captures(tmp_path: Path) -> None:
    """`compare runs/a runs/b --run-dir runs`."""
    run = Run(tmp_path / "runs")
    nested = write_trace(tmp_path / "runs" / "a" / "captures" / "x", draw()).folder
    run = saved(run.folder, **run.relative({"rollout": nested, "train": nested}))
    for role in ("rollout", "train"):
        assert run.capture_folder(role).resolve() == nested


def test_linking_a_capture_twice_gives_the_newer(tmp_path: Path) -> None:
    run = saved(tmp_path / "run")
    for name in ("one", "two"):
        other = write_trace(tmp_path / name, draw())
        names = run.relative({"train": other.folder})
        assert (run.folder / names["train"]).resolve() == other.folder


HOLD = """
import sys, time
from pathlib import Path
from rlk_align.trace.run import Run
with Run(Path(sys.argv[1])).locked():
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_run_that_another_process_holds_is_in_use(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run.folder)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ToolError, match="in use"), run.locked():
            pass
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    # The lock dies with its holder.
    with run.locked():
        assert run.folder.is_dir()


def test_a_lock_is_given_back(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")

    def fail() -> None:
        with run.locked():
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    with run.locked(), pytest.raises(ToolError), Run(run.folder).locked():
        pass


def test_a_folder_that_cannot_be_made_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TraceNotWritten), Run(tmp_path / "file" / "run").locked():
        pass


def test_a_verdict_is_json(tmp_path: Path) -> None:
    run = saved(tmp_path / "run")
    run.save_verdict({"status": "pass", "value": None})
    text = (run.folder / "verdict.json").read_text()
    assert json.loads(text) == {"status": "pass", "value": None}
    with pytest.raises(ValueError, match="JSON"):
        run.save_verdict({"value": float("nan")})


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (OSError(errno.EROFS, "Read-only file system"), "may write to"),
        (PermissionError(errno.EACCES, "Permission denied"), "may write to"),
        (SafetensorError("I/O error: Permission denied (os error 13)"), "may write to"),
        (OSError(errno.ENOSPC, "No space left on device"), "free some space"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "free some space"),
        (OSError("unknown"), "free some space"),
    ],
)
def test_a_failed_write_says_what_helps(tmp_path: Path, error: Exception, remedy: str) -> None:
    with pytest.raises(TraceNotWritten) as raised, writing(tmp_path):
        raise error
    assert remedy in raised.value.fix
    assert ("free some space" in raised.value.fix) == (remedy == "free some space")
