"""What is done to a run's folder by commands that name it twice, move it, or copy it."""

import os
import shutil
from pathlib import Path

import pytest
from inprocess import command
from synthetic import CONTRACT, compared_run

from rlk_align.trace.run import Run

EDGE = ("--edges", "prefill_vs_train", "--contract", CONTRACT)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two whole runs, `a` and `b`, in which the commands run."""
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        compared_run(tmp_path / name)
    return tmp_path


def passes(*words: object) -> None:
    code, said = command(*words)
    assert code == 0, said


def refused(code: int, *words: object) -> str:
    exit_code, said = command(*words)
    assert exit_code == code, said
    assert said.count("error: ") == 1, said
    return said


def test_a_run_is_not_written_over_by_its_own_comparison(runs: Path) -> None:
    for words in (("a", "b", "--run-dir", "a"), ("b", "a", "--run-dir", "a/../a/")):
        assert "would be overwritten" in refused(2, "compare", *words, *EDGE)
    passes("gate", "a", "--contract", CONTRACT)


def test_a_capture_is_not_written_over_by_its_own_scores(runs: Path) -> None:
    said = refused(2, "capture", "--engine", "hf", "-o", "a", "--tokens", "a")
    assert "name one run" in said
    passes("gate", "a", "--contract", CONTRACT)


def test_a_mistake_takes_no_earlier_verdict_away(runs: Path) -> None:
    passes("compare", "a", "b", "--run-dir", "c", *EDGE)
    again = ("compare", "a", "b", "--run-dir", "c", "--edges", "prefill_vs_train")
    refused(2, *again, "--contract", "nosuch")
    refused(2, "compare", "a", "nowhere", "--run-dir", "c")
    passes("gate", "c", "--contract", CONTRACT)


@pytest.mark.parametrize("name", ["run.json", "verdict.json", "comparison.json", "captures/x"])
def test_no_output_is_put_onto_the_runs_own_files(runs: Path, name: str) -> None:
    refused(2, "gate", "a", "--contract", CONTRACT, "--output", f"json=a/{name}")
    passes("gate", "a", "--contract", CONTRACT, "--output", "json=a/of_mine.json")
    passes("gate", "a", "--contract", CONTRACT)


def test_runs_may_be_moved_together_and_copied_with_what_they_link_to(runs: Path) -> None:
    passes("compare", "a", "b", "--run-dir", "c", *EDGE)
    (runs / "else").mkdir()
    for name in "abc":
        (runs / name).rename(runs / "else" / name)
    passes("gate", "else/c", "--contract", CONTRACT)
    shutil.copytree("else/c", "whole")  # follows the links
    shutil.rmtree("else/a")
    said = refused(3, "gate", "else/c", "--contract", CONTRACT)
    assert "its rollout capture" in said
    assert "is gone" in said
    passes("gate", "whole", "--contract", CONTRACT)


def test_a_copy_that_followed_the_links_may_be_compared_into_again(runs: Path) -> None:
    passes("compare", "a", "b", "--run-dir", "c", *EDGE)
    shutil.copytree("c", "copy")
    passes("compare", "a", "b", "--run-dir", "copy", *EDGE)
    passes("gate", "copy", "--contract", CONTRACT)


def test_a_place_without_room_for_the_last_run_is_no_failure(runs: Path) -> None:
    shutil.rmtree("rlk-runs")
    Path("rlk-runs").write_text("")
    passes("compare", "a", "b", "--run-dir", "c", *EDGE)


@pytest.mark.parametrize(
    "words",
    [("--layers", "0"), ("--sites", "attn"), ("--seed", "4"), ("--fresh",), ("--production",)],
)
def test_flags_of_a_capture_are_no_flags_of_two_runs(runs: Path, words: tuple[str, ...]) -> None:
    assert "as they are" in refused(2, "compare", "a", "b", "--run-dir", "c", *words)


def test_names_that_are_no_text_are_kept_as_escapes(runs: Path) -> None:
    passes("compare", "a", "b", "--run-dir", os.fsdecode(b"r\xff"), *EDGE)


def test_a_run_needs_a_folder(runs: Path) -> None:
    assert "folder of its own" in refused(2, "compare", "a", "b", "--run-dir", "", *EDGE)
    assert "folder of its own" in refused(2, "capture", "--engine", "hf", "-o", "")


def test_recompute_says_where_the_record_is_another(runs: Path) -> None:
    words = ("gate", "a", "--recompute", "--contract", CONTRACT)
    assert "warning" not in command(*words)[1]
    text = (runs / "a" / "comparison.json").read_text()
    (runs / "a" / "comparison.json").write_text(text.replace('"tokens": 15', '"tokens": 14', 1))
    code, said = command(*words)
    assert code == 0
    assert "comparison.json was changed after it was written; the captures are judged" in said
    Run(runs / "a").finish()  # a forger writes checksums too
    code, said = command(*words)
    assert code == 0
    assert "comparison.json disagrees with its captures" in said


def test_prompts_from_a_pipe_are_refused(runs: Path) -> None:
    os.mkfifo("pipe")
    assert "not a regular file" in refused(2, "compare", "--rollout", "hf", "--prompts", "pipe")
