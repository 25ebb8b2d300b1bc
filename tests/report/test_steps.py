"""The page over steps: each finding once, and axes with round numbers."""

import math
import re

import pytest

from rlk_align.logs.monitor.history import MAX_RECORDS, History
from rlk_align.logs.monitor.record import Finding, Interval, Level, StepRecord
from rlk_align.report.html.steps import run_steps, steps_page
from rlk_align.report.html.svg import round_ticks


def finding(name: str, value: float, level: Level = "fail") -> Finding:
    return Finding(level=level, name=name, value=value, limit=1.0, why=f"{name} at {value:g}")


def step(number: int, *findings: Finding) -> StepRecord:
    k3 = Interval(value=0.01 * number, low=0.0, high=0.02 * number)
    return StepRecord(step=number, tokens=100, k3=k3, findings=list(findings))


def history(*records: StepRecord) -> History:
    seen = History()
    for record in records:
        seen.add(record)
    return seen


def test_a_finding_has_one_row_with_its_first_and_last_step() -> None:
    seen = history(
        step(0, finding("outliers", 2, "warn")),
        step(1),
        step(2, finding("k3", 3), finding("outliers", 4, "warn")),
        step(3, finding("k3", 5)),
        step(4, finding("k3", 6, "warn")),
    )
    view = run_steps(0, "run", seen)
    assert view.status == "fail"
    assert view.findings == [
        ["outliers", "warn", "0", "2", "2", "4", "1", "outliers at 4"],
        ["k3", "fail", "2", "3", "2", "5", "1", "k3 at 5"],
        ["k3", "warn", "4", "4", "1", "6", "1", "k3 at 6"],
    ]


def test_findings_are_counted_over_steps_that_the_charts_leave_out() -> None:
    steps = 2 * MAX_RECORDS + 10
    seen = history(*(step(n, finding("k3", n)) for n in range(steps)))
    assert len(seen.records) <= MAX_RECORDS
    (row,) = run_steps(0, "run", seen).findings
    assert row[2:5] == ["0", str(steps - 1), str(steps)]


def test_only_warnings_pass_and_no_step_does_not() -> None:
    warned = history(step(0, finding("noise", 2, "warn")))
    assert run_steps(0, "run", warned).status == "pass"
    assert run_steps(0, "run", History()).status == "inconclusive"
    vacuous = history(step(0, finding("vacuous", 0, "inconclusive")), step(1, finding("k3", 2)))
    assert run_steps(0, "run", vacuous).status == "inconclusive"


def test_failing_steps_are_shaded_in_stretches() -> None:
    bad = finding("k3", 2)
    seen = history(step(0), step(1, bad), step(2, bad), step(3), step(4, bad))
    page = steps_page({"run": seen})
    (chart,) = re.findall(r'<svg id="r0-k3".*?</svg>', page, re.DOTALL)
    assert chart.count('class="failing"') == 2
    widths = [float(w) for w in re.findall(r'class="failing"[^>]* width="([\d.]+)"', chart)]
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.2)


@pytest.mark.parametrize(
    ("low", "high"), [(0, 49), (-0.0198, 0.0142), (-0.0488, 0.425), (3e-7, 9.1e-6), (1e3, 5e7)]
)
def test_ticks_are_round_and_within(low: float, high: float) -> None:
    ticks = round_ticks(low, high, 5)
    assert 2 <= len(ticks) <= 6
    values = [value for value, _ in ticks]
    assert all(low - 1e-12 <= v <= high * (1 + 1e-12) for v in values)
    space = values[1] - values[0]
    lead = space / 10 ** math.floor(math.log10(space) + 1e-9)
    assert min(abs(lead - m) for m in (1, 2, 5)) < 1e-6
    for value, label in ticks:
        assert float(label.replace(",", "")) == pytest.approx(value, rel=1e-6, abs=1e-12)


def test_a_run_of_one_step_is_drawn() -> None:
    page = steps_page({"run": history(step(7))})
    assert 'class="dot s0"' in page
    assert ">7</text>" in page
