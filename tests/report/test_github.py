"""Annotations and the summary of a step, read as the runner of GitHub Actions reads them."""

import re
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import comparisons
import pytest
from hostile_runs import (
    doubtful_source,
    hostile_source,
    huge_source,
    made_source,
)
from report_runs import report_run

from rlk_align.report.github import workflow_commands
from rlk_align.report.source import load_source
from rlk_align.report.verdict import markdown

OVER = "layers.1.act"
COMMAND = re.compile(r"::(error|warning|notice) ([^:]*)::(.*)")


@dataclass
class Command:
    level: str
    properties: dict[str, str]
    message: str


def read(text: str) -> list[Command]:
    """Every line is one command; what is spelled is undone."""
    found = []
    for line in text.splitlines():
        match = COMMAND.fullmatch(line)
        assert match, line
        given = dict(pair.split("=", 1) for pair in match[2].split(","))
        spelled = {name: spell(value) for name, value in given.items()}
        found.append(Command(match[1], spelled, spell(match[3])))
    return found


def spell(text: str) -> str:
    for name, char in (("3A", ":"), ("2C", ","), ("0A", "\n"), ("0D", "\r"), ("25", "%")):
        text = text.replace(f"%{name}", char)
    return text


def test_the_first_error_is_the_first_operator_that_is_off(tmp_path: Path) -> None:
    run = report_run(tmp_path / "failing", over=[OVER, "layers.1.down_proj"])
    first, *rest = read(workflow_commands(load_source(str(run.folder), None)))
    assert first.level == "error"
    assert first.properties == {
        "file": "engine/layers.py",
        "line": "12",
        "title": f"rlk-align: first divergence at {OVER}",
    }
    assert "further from exact" in first.message
    assert "Side: the training side is off." in first.message
    assert f"Next: check {OVER} on the train side" in first.message
    assert any("layers.1.down_proj" in c.properties["title"] for c in rest)
    assert any("noise-excess is breached" in c.properties["title"] for c in rest)
    assert len({str(c) for c in rest}) == len(rest)


def test_a_healthy_run_is_not_annotated(tmp_path: Path) -> None:
    run = report_run(tmp_path / "healthy")
    source = load_source(str(run.folder), None)
    assert not [c for c in read(workflow_commands(source)) if c.level == "error"]
    assert "rlk-align: PASS" in markdown(source)


def test_what_cannot_be_judged_is_an_error(tmp_path: Path) -> None:
    found = read(workflow_commands(doubtful_source(tmp_path / "run")))
    assert found[0].level == "error"
    assert "nothing can be concluded" in found[0].properties["title"]


def test_waivers_are_told_before_they_end(tmp_path: Path) -> None:
    """Expired an error, unused a warning, ending within 14 days a notice, later nothing."""
    comparison = comparisons.comparison()
    given = {"limit": "l0", "owner": "me", "reason": "known"}
    ends = ("2030-01-10", "2030-01-15", "2030-01-29", "2030-01-30")
    waivers = [given | {"expires": date.fromisoformat(end)} for end in ends]
    contract = comparisons.contract(waivers=waivers)
    found = read(workflow_commands(made_source(tmp_path / "run", comparison, contract)))
    by_level = {
        level: [re.findall(r"2030-01-\d\d", c.message)[0] for c in found if c.level == level]
        for level in ("error", "warning", "notice")
    }
    assert by_level["error"][-1] == "2030-01-10"
    assert by_level["warning"] == ["2030-01-15", "2030-01-29", "2030-01-30"]
    assert by_level["notice"] == ["2030-01-15", "2030-01-29"]


@pytest.mark.parametrize("made", [hostile_source, doubtful_source, huge_source])
def test_nothing_that_a_run_says_is_a_command_or_a_property(tmp_path: Path, made) -> None:
    text = workflow_commands(made(tmp_path / "run"))
    found = read(text)
    assert found
    for level in ("error", "warning", "notice"):
        assert sum(c.level == level for c in found) <= 10
    for command in found:
        assert set(command.properties) <= {"file", "line", "title"}
        assert command.properties["title"].startswith("rlk-align: ")
        assert "\n" not in "".join(command.properties.values())
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", text)
    assert len(text) < 100_000


def test_the_largest_runs_summary_fits(tmp_path: Path) -> None:
    source = huge_source(tmp_path / "run")
    assert len(markdown(source).encode()) < 64 * 1024
    errors = [c for c in read(workflow_commands(source)) if c.level == "error"]
    assert len(errors) == 10
    assert "a waiver has expired" in errors[1].properties["title"]
    assert re.search(r"\d{3} limits do not hold", errors[0].message)
