"""What is not ours reaches the terminal as text, whatever it holds; and a verdict its exit code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk_align.text import line, printable

BAD = ["\x1b[31mred", "\x9b1m", "\x07", "\r", "\u202egnp.", "\u200b", "\ud800", "\x00", "\x7f"]


@pytest.mark.parametrize("text", BAD)
def test_what_a_terminal_acts_upon_is_shown(text: str) -> None:
    shown = printable(f"a{text}b")
    assert shown.isprintable()
    assert "\\" in shown
    assert shown.startswith("a")
    assert shown.endswith("b")


def test_letters_signs_and_brackets_stay() -> None:
    text = "naïve Δ ≠ 漢字 🙂 [bold]a\\b[/bold]"
    assert printable(text) == text
    assert line(text).plain == text


def test_line_breaks_stay_where_they_are_wanted() -> None:
    assert printable("a\n\tb") == "a\\n\\tb"
    assert printable("a\n\tb\x1b", lines=True) == "a\n\tb\\x1b"


@given(st.text())
def test_nothing_else_gets_through(text: str) -> None:
    assert printable(text).isprintable()


def run(*words: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlk_align", *map(str, words)]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, **options)


def test_a_folders_name_cannot_colour_an_error(tmp_path: Path) -> None:
    done = run("gate", tmp_path / "\x1b[31mrun")
    assert done.returncode == 2
    assert "\x1b" not in done.stderr
    assert "\\x1b[31mrun is not a run" in done.stderr


def test_a_full_disk_behind_stdout_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = run("doctor", stdout=full)
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert "No space left" in done.stderr


def test_a_terminal_that_knows_ascii_alone_is_enough() -> None:
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = run("compare", "--help", stdout=subprocess.PIPE, env=env)
    assert done.returncode == 0
    assert done.stdout.isascii()
