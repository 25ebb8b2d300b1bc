"""The tests that only the commands with `-all` run exist."""

import re
from pathlib import Path

import pytest
from long_tests import LONG

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", LONG)
def test_each_entry_is_the_beginning_of_a_test_s_id(name: str) -> None:
    """What follows the function's name is not checked: an entry without effect leaves its test in
    the default run."""
    file, _, test = name.partition("::")
    function = re.match(r"\w+", test)
    assert function is not None
    assert f"def {function[0]}(" in (TESTS / file).read_text(encoding="utf-8")
