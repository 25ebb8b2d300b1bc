"""What the reports name is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)")


@pytest.mark.parametrize("report", sorted((ROOT / "reports").glob("*.md")), ids=lambda p: p.name)
def test_every_test_that_a_report_names_exists(report: Path) -> None:
    for path, name in TEST.findall(report.read_text(encoding="utf-8")):
        assert (ROOT / path).is_file(), path
        source = (ROOT / path).read_text(encoding="utf-8")
        assert f"def {name}(" in source, f"{path}::{name}"


def test_the_cases_of_false_passes_each_name_one() -> None:
    text = (ROOT / "reports" / "no_false_pass.md").read_text(encoding="utf-8")
    text = text.partition("## Fuzzes")[0]
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    cases = [r for r in rows if not r.startswith(("| ---", "| case"))]
    assert len(cases) > 30
    assert not [r for r in cases if not TEST.search(r)]
