"""The tests that only the commands with `-all` run, and those that are kept, exist."""

import re
from pathlib import Path

import pytest
from long_tests import KEPT, LONG, named

TESTS = Path(__file__).resolve().parents[1]


def function_of(name: str) -> tuple[str, str]:
    """The file of a test and the name of its function."""
    file, _, test = name.partition("::")
    function = re.match(r"\w+", test)
    assert function is not None
    return file, function[0]


@pytest.mark.parametrize("name", sorted({"::".join(function_of(name)) for name in (*LONG, *KEPT)}))
def test_each_entry_is_the_beginning_of_a_test_s_id(name: str) -> None:
    """What follows the function's name is not checked: an entry without effect leaves its test in
    the default run."""
    file, function = function_of(name)
    assert f"def {function}(" in (TESTS / file).read_text(encoding="utf-8")


def test_a_kept_test_is_not_listed() -> None:
    assert [name for name in LONG if named(name, KEPT)] == []


def test_what_an_entry_means() -> None:
    assert named("a.py::test_b[1-x]", ["a.py::test_b"])
    assert named("a.py::test_b[1-x]", ["a.py::test_b[1-"])
    assert named("a.py::test_b[1-x]", ["a.py::test_b[1-x]"])
    assert not named("a.py::test_b_c", ["a.py::test_b"])
    assert not named("a.py::test_b[10]", ["a.py::test_b[1]"])
