"""The XML that a CI reads: its schema, its counts, and what is a failure of what."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from comparisons import ROOM
from hostile_runs import doubtful_source, hostile_source, huge_source
from report_runs import hostile_mismatch, report_run

from rlk_align.judge.checks import LimitCheck
from rlk_align.report.junit import junit
from rlk_align.report.source import load_source

OVER = "layers.1.act"
RESULT = ((), ("type", "message"))
SCHEMA: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # Element: its children and its attributes, as the xUnit plugin of Jenkins takes them. Those
    # that end in ! must be there.
    "testsuites": (("testsuite",), ("name", "time", "tests", "failures", "errors")),
    "testsuite": (
        ("testsuite", "properties", "testcase", "system-out", "system-err"),
        *[("name!", "tests!", "failures!", "errors!", "skipped", "time", "timestamp", "hostname")],
    ),
    "properties": (("property",), ()),
    "property": ((), ("name!", "value!")),
    "testcase": (
        ("skipped", "error", "failure", "system-out", "system-err"),
        ("name!", "classname", "time", "group"),
    ),
    "failure": RESULT,
    "error": RESULT,
    "skipped": RESULT,
    "system-out": ((), ()),
    "system-err": ((), ()),
}


def valid(text: str) -> ElementTree.Element:
    """Parsed; held against the schema, and its counts against what is there."""
    root = ElementTree.fromstring(text)
    assert root.tag == "testsuites"
    for element in root.iter():
        children, attributes = SCHEMA[element.tag]
        assert {child.tag for child in element} <= set(children), element.tag
        assert set(element.keys()) <= {a.rstrip("!") for a in attributes}, element.tag
        assert {a[:-1] for a in attributes if a.endswith("!")} <= set(element.keys())
    for element in (root, *root.iter("testsuite")):
        counts = {
            "tests": len(list(element.iter("testcase"))),
            "failures": len(list(element.iter("failure"))),
            "errors": len(list(element.iter("error"))),
        }
        if element.tag == "testsuite":
            counts["skipped"] = len(list(element.iter("skipped")))
        assert {n: int(element.get(n, "")) for n in counts} == counts
    names = [(c.get("classname"), c.get("name")) for c in root.iter("testcase")]
    assert len(set(names)) == len(names)
    return root


def cases(root: ElementTree.Element) -> dict[str, ElementTree.Element]:
    return {f"{c.get('classname')}/{c.get('name')}": c for c in root.iter("testcase")}


def failing(root: ElementTree.Element, kind: str = "failure") -> dict[str, ElementTree.Element]:
    found = {name: case.find(kind) for name, case in cases(root).items()}
    return {name: element for name, element in found.items() if element is not None}


def named(check: LimitCheck) -> str:
    return f"{check.limit} [{check.op_class}]" if check.op_class else check.limit


def test_the_schema_is_held() -> None:
    none, one = ("tests='0' failures='0' errors='0'", "tests='1' failures='0' errors='0'")
    valid(f"<testsuites {none}/>")
    valid(f"<testsuites {none}><testsuite name='x' {none} skipped='0'/></testsuites>")
    for wrong in (
        f"<testsuite name='x' {one} skipped='0'/>",
        f"<testsuite {none} skipped='0'/>",
        "<testcase name='x'/>",
    ):
        with pytest.raises(AssertionError):
            valid(f"<testsuites {none}>{wrong}</testsuites>")


def test_a_test_case_for_each_limit_and_class_of_operators(tmp_path: Path) -> None:
    run = report_run(tmp_path / "failing", over=[OVER])
    source = load_source(str(run.folder), None)
    root = valid(junit(source))
    checks = source.verdict.checks
    wanted = {named(c) for c in checks}
    found = {n.partition("/")[2] for n in cases(root) if "prefill_vs_train" in n}
    assert found == wanted
    wrong = failing(root)
    assert all("prefill_vs_train" in name for name in wrong)
    broken = {named(c) for c in source.verdict.breaches}
    assert {name.partition("/")[2] for name in wrong} == broken
    [said] = [e for e in wrong.values() if OVER in e.get("message", "")]
    assert "roundings" in (said.text or "")
    assert "engine/layers.py:12" in (said.text or "")
    properties = {p.get("name"): p.get("value") for p in root.iter("property")}
    assert properties["status"] == "fail"
    assert float(properties["max_abs_dlogp"] or "nan") == 0.6
    assert float(properties["noise-excess value"] or "nan") == pytest.approx(0.6 / ROOM / 0.01)


def test_a_healthy_run_has_no_failure(tmp_path: Path) -> None:
    run = report_run(tmp_path / "healthy")
    root = valid(junit(load_source(str(run.folder), None)))
    assert root.get("failures") == root.get("errors") == "0"
    assert int(root.get("tests", "0")) > 10


def test_what_cannot_be_judged_is_an_error(tmp_path: Path) -> None:
    mismatch = hostile_mismatch()
    run = report_run(tmp_path / "stopped", mismatches=[mismatch], edges=[], controls=None)
    root = valid(junit(load_source(str(run.folder), None)))
    assert set(failing(root, "error")) == {
        "rlk-align.evidence/weights",
        "rlk-align.evidence/conclusive",
    }
    assert not failing(root)
    root = valid(junit(doubtful_source(tmp_path / "doubtful")))
    assert set(failing(root, "error")) == {"rlk-align.evidence/conclusive"}
    assert "mismatch allowed" in failing(root, "skipped")["rlk-align.evidence/weights"].get(
        "message", ""
    )


def test_waived_is_skipped_with_its_reason_and_expired_is_a_failure(tmp_path: Path) -> None:
    root = valid(junit(hostile_source(tmp_path / "run")))
    waived = [e for n, e in failing(root, "skipped").items() if "prefill_vs_train" in n]
    assert waived
    assert all("waived by" in e.get("message", "") for e in waived)
    expired = [n for n in failing(root) if n.startswith("rlk-align.waivers/")]
    assert len(expired) == 1
    assert "2030-01-01" in expired[0]


@pytest.mark.parametrize("made", [hostile_source, doubtful_source, huge_source])
def test_hostile_text_is_text(tmp_path: Path, made) -> None:
    text = junit(made(tmp_path / "run"))
    root = valid(text)
    said = " ".join([*root.itertext(), *(v for e in root.iter() for v in e.attrib.values())])
    assert "<script>" in said
    assert "\\x1b" in said or "\\x1b" in text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\ufffe\uffff\u202e]", text)
    assert len(text) < 2**20


def test_it_is_the_same_wherever_the_run_lies(tmp_path: Path) -> None:
    run = report_run(tmp_path / "run", over=[OVER])
    assert str(tmp_path) not in junit(load_source(str(run.folder), None))


def test_weights_that_a_side_holds_rounded_are_no_error(tmp_path: Path) -> None:
    run = report_run(tmp_path / "run", casts={"rollout": "bfloat16"})
    text = junit(load_source(str(run.folder), None))
    (case,) = ElementTree.fromstring(text).iterfind(".//testcase[@name='weights']")
    assert [child.tag for child in case] == ["system-out"]
    assert case[0].text == "weights: cast to bfloat16 on the rollout side"
