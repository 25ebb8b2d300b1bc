"""Tests that only the commands with `-all` run, beside those marked `whole_matrix` in their files.

    python tests/support/long_tests.py REPORT.xml

`long_tests.txt` lists those that take SECONDS or more, except for those of `kept_tests.txt`, which
stand for what only real engines, real processes or long inputs show. The command adds the tests of
a report that `--junitxml` has written. An entry is an id from `tests/` on, a function with all its
cases, or the beginning of a case, `file.py::function[case`.
"""

import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest

SECONDS = 1.0
FILE = Path(__file__).with_name("long_tests.txt")
LONG = tuple(FILE.read_text(encoding="utf-8").splitlines())
KEPT = tuple(
    line
    for line in FILE.with_name("kept_tests.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
)


def namer(entries: Collection[str]) -> Callable[[str], bool]:
    """Returns a function that says whether one of the entries means a test."""
    whole = frozenset(entries)
    beginnings = tuple(e for e in entries if "[" in e and not e.endswith("]"))
    return lambda test: (
        test in whole or test.partition("[")[0] in whole or test.startswith(beginnings)
    )


def named(test: str, entries: Collection[str]) -> bool:
    """Whether one of the entries means a test."""
    return namer(entries)(test)


def mark_long(items: list[pytest.Item]) -> None:
    """Marks the tests of LONG `whole_matrix`."""
    is_long = namer(LONG)
    for item in items:
        if is_long(item.nodeid.removeprefix("tests/")):
            item.add_marker(pytest.mark.whole_matrix)


def slow(report: Path) -> Iterator[str]:
    """The ids of a report's tests that are long and not kept."""
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        file = case.get("classname", "").removeprefix("tests.").replace(".", "/")
        name = f"{file}.py::{case.get('name')}"
        if float(case.get("time", 0)) >= SECONDS and not named(name, KEPT):
            yield name


def main(report: Path) -> None:
    names = {name for name in LONG if not named(name, KEPT)}.union(slow(report))
    FILE.write_text("".join(f"{name}\n" for name in sorted(names)), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
