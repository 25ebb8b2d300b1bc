"""What the reports and the pages name is there."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = re.compile(r"contract ([a-z][\w-]*) (\d+\.\d+\.\d+)")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)")
SOURCE = re.compile(r"\breports/[\w/.-]+\.(?:jsonl|json|md)")


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


def test_sample_outputs_name_the_versions_of_the_contracts() -> None:
    contracts = [tomllib.loads(p.read_text("utf-8")) for p in (ROOT / "contracts").glob("*.toml")]
    version = {c["id"]: c["version"] for c in contracts}
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = [SAMPLE.findall(page.read_text(encoding="utf-8")) for page in pages]
    samples = [sample for of_page in named for sample in of_page if sample[0] in version]
    assert len(samples) >= 3
    assert [s for s in samples if version[s[0]] != s[1]] == []


def missing_sources(contract: str) -> list[str]:
    """Files of reports/ that a contract's text names and the repository does not have."""
    return [path for path in SOURCE.findall(contract) if not (ROOT / path).is_file()]


@pytest.mark.parametrize(
    "contract", sorted((ROOT / "contracts").glob("*.toml")), ids=lambda p: p.name
)
def test_every_report_that_a_contract_names_exists(contract: Path) -> None:
    assert missing_sources(contract.read_text(encoding="utf-8")) == []


def test_a_report_that_does_not_exist_is_seen() -> None:
    text = "measured (reports/calibration.md); on an H200 (reports/engines/engines-h200-probe.md)"
    assert missing_sources(text) == ["reports/engines/engines-h200-probe.md"]
