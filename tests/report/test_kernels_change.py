"""What the kernels change, side by side."""

import io
from pathlib import Path

from rich.console import Console
from synthetic import CONTRACT, compared_run, corrupt, draw

from rlk_align.judge.verdict import judge_by
from rlk_align.report.kernels_change import show_change


def test_production_is_shown_without_and_with_the_kernels(tmp_path: Path) -> None:
    values = draw()
    runs = {
        "off": compared_run(tmp_path / "off", production=corrupt(values, "logprob", [(1, 4)])),
        "on": compared_run(tmp_path / "on", production=values),
        "not": compared_run(tmp_path / "not"),
    }
    verdicts = {name: judge_by(run.comparison, CONTRACT) for name, run in runs.items()}

    def shown(off: str, on: str) -> list[list[str]]:
        out = io.StringIO()
        show_change(verdicts[off], verdicts[on], tmp_path / off, Console(file=out, width=80))
        return [line.split() for line in out.getvalue().splitlines()]

    both = shown("off", "on")
    at = next(i for i, words in enumerate(both) if words[:1] == ["production_vs_observed"])
    assert both[at][1] == "off"
    assert int(both[at][-1]) > 0
    assert both[at + 1][0] == "rlk"
    assert both[at + 1][-1] == "0"
    assert not any("production_vs_observed" in words for words in shown("off", "not"))


def test_both_verdicts_are_told_in_a_line_each(tmp_path: Path) -> None:
    values = draw()
    off = compared_run(tmp_path / "off", corrupt(values, "layers.1.act", [(1, 4)]))
    on = compared_run(tmp_path / "on")
    out = io.StringIO()
    verdicts = [judge_by(run.comparison, CONTRACT) for run in (off, on)]
    show_change(*verdicts, tmp_path / "off", Console(file=out, width=200))
    said = out.getvalue().splitlines()
    first, second, folder = said[1:4]
    assert first.split()[:3] == ["kernels", "off", "FAIL"] or "PASS" in first
    assert "first divergence: layers.1.act" in first
    assert second.split()[:3] == ["kernels", "rlk", "PASS"]
    assert second.endswith("no first divergence")
    assert folder.endswith(str(tmp_path / "off"))
