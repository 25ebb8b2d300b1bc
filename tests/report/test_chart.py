"""`rlk-align report chart`: every value is drawn or said to be missing, in three formats."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparisons import site
from inprocess import command
from report_runs import HOSTILE, hostile_engines, made_rows, report_run
from synthetic import SHAPE

from rlk_align.cli.compare import WITHOUT
from rlk_align.model.sites import model_sites
from rlk_align.report.chart import run_chart
from rlk_align.report.html.samples import deltas
from rlk_align.report.source import load_source
from rlk_align.results import EngineRecord, Mismatch
from rlk_align.trace.run import Run

KERNELS = {
    side: EngineRecord(
        name="hf",
        version="1",
        options={"kernels": "rlk"},
        dtype="bfloat16",
        model="m",
        environment={},
    )
    for side in ("rollout", "train")
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return report_run(tmp_path_factory.mktemp("run") / "run", probed=False)


def conclude(run: Run, change: Callable[[dict[str, Any]], None]) -> Run:
    """Changes what a run's comparison says of its only edge, and seals it again."""
    comparison = run.comparison
    edge = comparison.edges[0]
    fields = {"edges": [edge]}
    change(fields)
    run.save_comparison(
        comparison.model_copy(update=fields),
        made_rows(model_sites(SHAPE), 3, 32, " word", None, ()),
    )
    run.finish()
    return run


def both(folder: Path) -> Run:
    """A run with the kernels, all of whose rows are equal, and the one without inside it."""
    run = report_run(folder, probed=False, engines=KERNELS)
    edge = run.comparison.edges[0]
    equal = [
        site(s.site, layer=s.layer, op=s.op, op_class=s.op_class, rows=s.rows) for s in edge.sites
    ]
    conclude(run, lambda f: f.update(edges=[edge.model_copy(update={"sites": equal})]))
    report_run(folder / WITHOUT, probed=False)
    return run


def test_each_operator_stands_at_its_mean_and_an_exact_zero_on_its_lane(run: Run) -> None:
    source = load_source(str(run.folder), None)
    upper = run_chart(source).axes[0]
    [line] = [one for one in upper.lines if len(one.get_xdata()) > 1]
    sites = [s for s in source.verdict.comparison.edges[0].sites if s.op != "logprob"]
    y = np.asarray(line.get_ydata(), dtype=float)
    assert [t.get_text() for t in upper.get_xticklabels()] == [s.op for s in sites]
    assert y[1:].tolist() == [s.mean_rel_l2 for s in sites[1:]]
    assert sites[0].mean_rel_l2 == 0
    [zero] = [
        at
        for at, label in zip(upper.get_yticks(), upper.get_yticklabels(), strict=True)
        if label.get_text() == "exact 0"
    ]
    assert y[0] == zero < min(y[1:])


def test_the_histogram_counts_every_token(run: Run) -> None:
    source = load_source(str(run.folder), None)
    delta = deltas(source, source.verdict.comparison.edges[0])
    [steps] = run_chart(source).axes[1].patches
    counts, edges, _ = steps.get_data()
    assert counts.sum() == len(delta) == 48
    assert counts.tolist() == np.histogram(delta, bins=edges)[0].tolist()


def test_a_run_with_the_kernels_is_drawn_off_and_on(tmp_path: Path) -> None:
    run = both(tmp_path / "run")
    assert command("report", "chart", run.folder, "-o", tmp_path / "drift.svg")[0] == 0
    svg = (tmp_path / "drift.svg").read_text(encoding="utf-8")
    assert "kernels off, mean of the rows that differ" in svg
    assert "kernels on, mean of the rows that differ" in svg
    off, on = (load_source(str(run.folder / name), None) for name in (WITHOUT, "."))
    lines = [one for one in run_chart(on, off).axes[0].lines if len(one.get_xdata()) > 1]
    assert len(set(lines[1].get_ydata())) == 1, "every operator at the exact zero"
    assert lines[0].get_ydata()[1] > lines[1].get_ydata()[1]


def test_a_folder_left_by_another_run_is_not_drawn(tmp_path: Path) -> None:
    run = report_run(tmp_path / "run", probed=False)
    report_run(run.folder / WITHOUT, probed=False)
    assert command("report", "chart", run.folder, "-o", tmp_path / "drift.svg")[0] == 0
    assert "kernels" not in (tmp_path / "drift.svg").read_text(encoding="utf-8")


def test_what_cannot_be_drawn_is_said(tmp_path: Path) -> None:
    run = report_run(tmp_path / "run", probed=False, nan=["layers.1.act"])
    sites = run.comparison.edges[0].sites
    lost = [s.model_copy(update={"valued_rows": 0}) if s.op == "o_proj" else s for s in sites]
    edge = run.comparison.edges[0].model_copy(update={"sites": lost})
    figure = run_chart(
        load_source(str(conclude(run, lambda f: f.update(edges=[edge])).folder), None)
    )
    words = [text.get_text() for axes in figure.axes for text in axes.get_legend().get_texts()]
    assert "NaN or infinite" in words
    assert "2 operators without values" in words


def test_a_token_that_is_nan_is_counted(tmp_path: Path) -> None:
    run = report_run(tmp_path / "run", probed=False, nan=["layers.1.act"])
    legend = run_chart(load_source(str(run.folder), None)).axes[1].get_legend()
    assert legend.get_texts()[0].get_text() == "48 tokens; 1 NaN or infinite are omitted"


@pytest.mark.parametrize(("suffix", "head"), [("png", b"\x89PNG"), ("PDF", b"%PDF")])
def test_the_suffix_says_the_format(run: Run, tmp_path: Path, suffix: str, head: bytes) -> None:
    path = tmp_path / f"drift.{suffix}"
    assert command("report", "chart", run.folder, "-o", path) == (0, f"{path}\n")
    assert path.read_bytes().startswith(head)
    assert list(tmp_path.iterdir()) == [path]


def test_the_same_run_gives_the_same_bytes(run: Run, tmp_path: Path) -> None:
    paths = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for path in paths:
        assert command("report", "chart", run.folder, "-o", path)[0] == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_names_from_a_run_are_drawn_as_text(tmp_path: Path) -> None:
    hostile = {
        side: engine.model_copy(update={"version": "$\\frac{1}{0}$ <b>"})
        for side, engine in hostile_engines().items()
    }
    run = report_run(tmp_path / "run", probed=False, engines=hostile)
    assert command("report", "chart", run.folder, "-o", tmp_path / "drift.svg")[0] == 0
    svg = (tmp_path / "drift.svg").read_text(encoding="utf-8")
    assert "$\\frac{1}{0}$ &lt;b&gt;" in svg
    assert HOSTILE not in svg
    assert "\x1b" not in svg


def test_bad_input_says_what_to_do(run: Run, tmp_path: Path) -> None:
    stopped = report_run(
        tmp_path / "stopped",
        probed=False,
        mismatches=[Mismatch(kind="tokens", name="sample 0", rollout="1", train="2")],
    )
    empty = report_run(tmp_path / "empty", probed=False)
    edge = empty.comparison.edges[0]
    lost = [s.model_copy(update={"valued_rows": 0}) for s in edge.sites]
    conclude(empty, lambda f: f.update(edges=[edge.model_copy(update={"sites": lost})]))
    out = tmp_path / "drift.png"
    for words, code, said in (
        ((run.folder, "-o", tmp_path / "drift.jpg"), 2, "one of .png, .svg, .pdf"),
        ((run.folder, "-o", tmp_path / "drift"), 2, "a file without a suffix"),
        ((tmp_path / "nothing", "-o", out), 2, "nothing"),
        ((stopped.folder, "-o", out), 2, "its comparison stopped before computing any"),
        ((empty.folder, "-o", out), 2, "larger --trace-budget"),
        ((run.folder, "-o", tmp_path / "no" / "drift.png"), 2, "no file can be written there"),
    ):
        code_seen, text = command("report", "chart", *words)
        assert (code_seen, said in text) == (code, True), text
        assert "Traceback" not in text
    assert not out.exists()


def test_a_missing_matplotlib_names_the_extra(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, text = command("report", "chart", run.folder, "-o", tmp_path / "drift.png")
    assert code == 2
    assert "pip install 'rlk-align[charts]'" in text


def test_no_legend_covers_a_limit_of_the_histogram(tmp_path: Path) -> None:
    run = report_run(tmp_path / "run", probed=False)
    figure = run_chart(load_source(str(run.folder), None))
    figure.draw_without_rendering()
    histogram = figure.axes[1]
    assert histogram.get_legend().get_window_extent().y0 >= histogram.get_window_extent().y1
