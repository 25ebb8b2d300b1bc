"""What the kernels change, side by side."""

import io
from pathlib import Path

from rich.console import Console
from synthetic import compared_run, corrupt, draw

from rlk_align.judge.verdict import judge_by
from rlk_align.report.change import show_change

CONTRACT = str(Path(__file__).parents[1] / "synthetic.toml")


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
        show_change(verdicts[off], verdicts[on], Console(file=out, width=80))
        return [line.split() for line in out.getvalue().splitlines()]

    both = shown("off", "on")
    at = next(i for i, words in enumerate(both) if words[:1] == ["production_vs_observed"])
    assert both[at][1] == "off"
    assert int(both[at][-1]) > 0
    assert both[at + 1][0] == "rlk"
    assert both[at + 1][-1] == "0"
    assert not any("production_vs_observed" in words for words in shown("off", "not"))
