"""What a verdict says on a terminal."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from synthetic import CONTRACT, compared_run, corrupt, draw

from rlk_align.judge.verdict import judge_by
from rlk_align.report.document_terminal import show_document
from rlk_align.report.verdict import verdict_document
from rlk_align.trace.run import Run


def printed(run: Run, width: int = 100) -> str:
    out = io.StringIO()
    verdict = judge_by(run.comparison, CONTRACT)
    show_document(
        verdict_document(verdict, run.folder), Console(file=out, width=width, soft_wrap=True)
    )
    return out.getvalue()


def test_a_pass_says_what_it_rests_on(tmp_path: Path) -> None:
    equal = printed(compared_run(tmp_path / "equal"))
    assert " PASS " in equal
    assert "rows are bit-equal" in equal
    assert "rows differ" not in equal
    values = draw()
    other = corrupt(values, "layers.1.act", [(1, 4)])
    other["logprob"] = values["logprob"]
    differing = printed(compared_run(tmp_path / "differing", other))
    assert " PASS " in differing
    assert "rows differ, at" in differing
    assert "within the limits of synthetic, not equal" in differing
    assert "closest  prefill_vs_train" in differing
    for text in (equal, differing):
        assert "keep it" not in text
        assert f"gate {tmp_path}" in text


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100])
def test_no_figure_is_cut(tmp_path: Path, width: int) -> None:
    run = compared_run(tmp_path / "run", corrupt(draw(), "layers.1.act", [(1, 4)]))
    text = printed(run, width)
    assert "…" not in text
    metrics = run.comparison.edges[0].metrics
    for size in (metrics.max_abs_dlogp, metrics.mean_abs_dlogp, metrics.p99_abs_dlogp, metrics.k3):
        assert f"{size:.2g}" in text
    assert ("edge " in text) == (width >= 80), "a table where there is room"
