"""A run's figures as columns."""

import math
from pathlib import Path

import pyarrow as pa
import pytest
from report_runs import report_run
from synthetic import BATCH, CONTRACT, NAMES, compared_run, corrupt, draw

import rlk_align
from rlk_align.api.loaded import Columns
from rlk_align.errors import BadOption
from rlk_align.trace.checksums import CHECKSUMS, add_checksums
from rlk_align.trace.run import ROWS

FAULT = (1, 4)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> rlk_align.LoadedRun:
    """A run with a fault in layers.1.act of one token."""
    folder = tmp_path_factory.mktemp("made") / "run"
    compared_run(folder, corrupt(draw(), "layers.1.act", [FAULT]))
    return rlk_align.load_run(folder, CONTRACT)


def rows(columns: Columns) -> list[dict]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def test_a_row_for_each_edge(run: rlk_align.LoadedRun) -> None:
    (row,) = rows(run.edges())
    metrics = run.verdict.comparison.edges[0].metrics
    raw = metrics.model_dump(exclude={"noise"})
    assert row == {"edge": "prefill_vs_train", "judged": True, **raw, "c": metrics.noise.c}
    assert row["tokens"] == 15
    assert row["max_abs_dlogp"] > 0.01


def test_a_row_for_each_site(run: rlk_align.LoadedRun) -> None:
    table = rows(run.sites())
    assert [row["site"] for row in table] == NAMES
    introduced = {row["site"]: row["introduced"] for row in table if row["introduced"]}
    assert introduced == {"layers.1.act": 1}
    (act,) = (row for row in table if row["site"] == "layers.1.act")
    assert (act["edge"], act["layer"], act["op"], act["differ"]) == (
        *("prefill_vs_train", 1, "act"),
        1,
    )
    assert act["max_rel_l2"] > 0


def test_a_row_for_each_token(run: rlk_align.LoadedRun) -> None:
    table = rows(run.tokens())
    assert len(table) == sum(len(s.prompt_ids) + len(s.response_ids) for s in BATCH.samples)
    a = [row for row in table if row["sample"] == 0]
    assert [row["token"] for row in a] == [1, 2, 3, 4, 5, 6, 7]
    assert [row["response"] for row in a] == [False] * 3 + [True] * 4
    for row in table:
        if row["first_logprob"] is None:
            assert row["dlogp"] is None
        else:
            assert row["dlogp"] == row["second_logprob"] - row["first_logprob"]
    differ = {(row["sample"], row["position"]) for row in table if row["dlogp"]}
    assert FAULT in differ
    assert all(sample == FAULT[0] and at >= FAULT[1] for sample, at in differ)
    worst = max(abs(row["dlogp"]) for row in table if row["dlogp"] is not None)
    assert worst == run.verdict.comparison.edges[0].metrics.max_abs_dlogp


def test_a_row_for_each_operator(run: rlk_align.LoadedRun, tmp_path: Path) -> None:
    # Values made by hand have no checkpoint: most operators say why they were not recomputed.
    units = run.verdict.comparison.referee
    table = rows(run.operators())
    assert [(r["side"], r["site"]) for r in table] == [(u.side, u.site) for u in units]
    assert all((row["rms"] is None) == bool(row["reason"]) for row in table)
    assert any(row["reason"] for row in table)
    report_run(tmp_path / "run", over=["layers.1.act"])
    made = rlk_align.load_run(tmp_path / "run")
    off = [r for r in rows(made.operators()) if r["site"] == "layers.1.act"]
    errors = {u.side: u.errors for u in made.verdict.comparison.referee if u.site == off[0]["site"]}
    assert {r["side"]: r["rms"] for r in off} == {s: e.rms for s, e in errors.items() if e}
    assert made.probe is not None
    assert "units" in made.json()


def test_pandas_and_arrow_take_them(run: rlk_align.LoadedRun) -> None:
    pandas = pytest.importorskip("pandas")
    for columns in (run.edges(), run.sites(), run.operators(), run.tokens()):
        frame, table = pandas.DataFrame(columns), pa.table(columns)
        assert list(frame.columns) == table.column_names == list(columns)
        assert len(frame) == table.num_rows
    tokens = pandas.DataFrame(run.tokens())
    assert tokens.dlogp.dtype == "float64"
    assert math.isnan(tokens.dlogp.iloc[0])


def test_a_run_without_rows_says_so(tmp_path: Path) -> None:
    folder = compared_run(tmp_path / "run").folder
    (folder / ROWS).unlink()
    (folder / CHECKSUMS).unlink()
    captures = [p.relative_to(folder).as_posix() for p in folder.glob(f"captures/*/{CHECKSUMS}")]
    add_checksums(folder, ["run.json", "comparison.json", "verdict.json", *captures])
    loaded = rlk_align.load_run(folder, CONTRACT)
    assert loaded.sites()["site"] == NAMES
    with pytest.raises(BadOption, match=r"has no comparison\.parquet"):
        loaded.tokens()
