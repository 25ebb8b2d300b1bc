"""What became worse from one run to another, in the languages of a CI."""

import json
from xml.etree import ElementTree

import pytest
from comparisons import comparison, contract, edge, metrics, site
from report_runs import HOSTILE

from rlk_align.judge.regression import RegressionVerdict, judge_regression
from rlk_align.report.formats import REGRESSION_FORMATS, renderer
from rlk_align.report.regression_formats import regression_commands

LIMITS = [
    {"id": "mean", "metric": "mean_abs_dlogp", "factor": 1.5, "why": "w", "source": "s"},
    {"id": "bits", "metric": "rows_differ", "why": "w", "source": "s"},
]
OURS = contract(regressions=LIMITS)


def judged(differ: int, mean: float = 0.01, name: str = "layers.0.act") -> RegressionVerdict:
    before, after = (
        comparison(edge(sites=[site(name, differ=d)], metrics=metrics(mean_abs_dlogp=m)))
        for d, m in ((0, 0.01), (differ, mean))
    )
    return judge_regression(before, after, OURS)


def text(kind: str, verdict: RegressionVerdict) -> str:
    return renderer(kind, REGRESSION_FORMATS)(verdict)


def test_what_is_worse_is_told_in_every_format() -> None:
    worse = judged(3)
    assert (worse.status, worse.exit_code) == ("fail", 1)
    assert "1 of 2 figures are worse than allowed" in text("markdown", worse)
    row = "| worse | `prefill_vs_train` | `layers.0.act` | `rows_differ` | 0 | 0.03 | 0 |"
    assert row in text("markdown", worse)
    root = ElementTree.fromstring(text("junit", worse))
    assert (root.get("failures"), root.get("errors")) == ("1", "0")
    (failed,) = [case for case in root.iter("testcase") if case.find("failure") is not None]
    assert (failed.get("name"), failed.get("classname")) == ("bits", "rlk-align.prefill_vs_train")
    assert json.loads(text("json", worse))["status"] == "fail"
    (command,) = regression_commands(worse).splitlines()
    assert command.startswith("::error title=rlk-align%3A worse than before::layers.0.act")


def test_nothing_worse_is_a_pass_without_annotations() -> None:
    same = judged(0)
    assert (same.status, same.exit_code) == ("pass", 0)
    assert "None of 2 figures is worse than allowed" in text("markdown", same)
    assert ElementTree.fromstring(text("junit", same)).get("failures") == "0"
    assert regression_commands(same) == ""


def test_a_doubt_is_an_error() -> None:
    fine = comparison()
    doubtful = judge_regression(fine, comparison(controls=None), OURS)
    assert json.loads(text("json", doubtful))["doubts"] == ["the second run: observer: no control"]
    assert "Nothing can be concluded" in text("markdown", doubtful)
    assert ElementTree.fromstring(text("junit", doubtful)).get("errors") == "1"
    assert regression_commands(doubtful).startswith("::error title=rlk-align%3A nothing can be")


@pytest.mark.parametrize("kind", REGRESSION_FORMATS)
def test_names_are_text(kind: str) -> None:
    said = text(kind, judged(3, name=HOSTILE))
    assert "<script>alert(1)</script></style>" not in said or kind == "json"
    assert not any(c in said for c in "\x1b\x00‮")
    assert len(regression_commands(judged(3, name=HOSTILE)).splitlines()) == 1
