"""The routing panel of the page: each flip in its layer and at its token, as what it is."""

import re
from pathlib import Path

import comparisons
import numpy as np
import pyarrow as pa
import pytest
from report_runs import report_run

from rlk_align.probe.record import Probe, ReplayedEdge
from rlk_align.report.html.page import run_page
from rlk_align.report.source import load_source
from rlk_align.results import EdgeRouting, LayerRouting
from rlk_align.trace.run import Run

SAMPLES, LENGTH = 3, 32
FLIPS = {(2, 5): "flipped", (2, 20): "flipped at the router", (0, 7): "flipped"}
UNKNOWN = (2, 3)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a run with these flips in layer 1, whose second edge was replayed."""
    run = report_run(
        tmp_path_factory.mktemp("sparse") / "run", samples=SAMPLES, length=LENGTH, probed=False
    )
    _route(run)
    return run_page(load_source(str(run.folder), None))


def _route(run: Run) -> None:
    comparison, rows = run.comparison, run.rows()
    at = {cell: cell[0] * LENGTH + cell[1] for cell in (*FLIPS, UNKNOWN)}
    flipped = np.zeros(len(rows), dtype=np.float32)
    flipped[[at[cell] for cell in FLIPS]] = 1
    unknown = np.zeros(len(rows), dtype=bool)
    unknown[at[UNKNOWN]] = True
    norm = rows["layers.1.mlp_norm"].to_numpy().copy()
    norm[[at[cell] for cell, kind in FLIPS.items() if "router" in kind]] = 0
    column = rows.column_names.index("layers.1.mlp_norm")
    rows = rows.set_column(column, "layers.1.mlp_norm", pa.array(norm))
    rows = rows.append_column("layers.1.experts", pa.array(flipped, mask=unknown))
    layer = LayerRouting(
        site="layers.1.experts",
        layer=1,
        rows=SAMPLES * LENGTH - 1,
        flipped=len(FLIPS),
        at_router=1,
        measured=1,
        ties=1,
        largest_gap=0.0,
        first_at_router=(2, 20),
    )
    routing = EdgeRouting(
        layers=[layer],
        tokens=SAMPLES * LENGTH,
        flipped_tokens=len(FLIPS),
        sampled=SAMPLES * LENGTH // 2,
        flipped_sampled=1,
        share_of_dlogp=0.5,
        mean_abs_dlogp_flipped=0.0625,
        mean_abs_dlogp_other=0.002,
    )
    (edge,) = comparison.edges
    replayed = ReplayedEdge(
        name=edge.name,
        side="train",
        rows=SAMPLES * LENGTH - 1,
        rest=comparisons.metrics(max_abs_dlogp=0.0078125, mean_abs_dlogp=0.0015),
        routing=comparisons.metrics(max_abs_dlogp=0.03125, mean_abs_dlogp=0.001),
        mean_abs_rest_flipped=0.0034,
        mean_abs_rest_other=0.0011,
    )
    edges = [edge.model_copy(update={"routing": routing})]
    run.save_comparison(comparison.model_copy(update={"edges": edges}), rows)
    run.save_probe(Probe(edges=[], replays=(replayed,)))
    run.finish()


def section(text: str) -> str:
    found = re.search(r'<h2 id="routing">.*?(?=<h2 id=)', text, re.DOTALL)
    assert found
    return found[0]


def cells(table: str) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows]


def test_the_sequences_with_the_most_flips_come_first(text: str) -> None:
    summaries = re.findall(r"<summary>(sample \d+: .*?)</summary>", section(text))
    assert summaries == [
        f"sample {n}: {count} of the {LENGTH} tokens shown are sent to other experts in some layer"
        for n, count in ((2, 2), (0, 1))
    ]


def test_each_token_is_what_it_is_to_the_layer(text: str) -> None:
    for sample in (2, 0):
        table = section(text).split(f"Token × sparse layer, sample {sample}, data</caption>")[1]
        states = {int(row[0]): row[3] for row in cells(table.split("</table>")[0]) if row}
        wanted = {p: kind for (s, p), kind in FLIPS.items() if s == sample}
        if sample == UNKNOWN[0]:
            wanted[UNKNOWN[1]] = "not compared"
        assert states == dict.fromkeys(range(LENGTH), "equal") | wanted


def test_what_is_drawn_is_what_the_table_says(text: str) -> None:
    """A path of one cell of each kind in the chart of sample 2, and the sign of the one at the
    router."""
    chart = section(text).split('id="routing-2"')[1].split("</svg>")[0]
    for kind in ("effect", "at-router", "none"):
        (path,) = re.findall(rf'<path d="([^"]*)" class="{kind}"/>', chart)
        assert path.count("M") == 1
    assert chart.count("×</text>") == 1
    assert "layer 1: flipped at the router, on equal inputs" in chart


def test_drift_with_routing_and_without(text: str) -> None:
    table = (
        section(text).split('aria-label="Drift with routing and without')[1].split("</table>")[0]
    )
    by_part = {row[1]: row[2:] for row in cells(table) if row}
    assert by_part["with routing"][2:4] == ["0.062", "0.002"]
    assert by_part["routing by itself"][:2] == ["0.031", "0.001"]
    rest = by_part["rest: train computes the other side&#39;s experts"]
    assert rest[:4] == ["0.0078", "0.0015", "0.0034", "0.0011"]
    assert "3 of 95 (3.2%), × 1 at the router" in section(text)


def test_a_dense_run_has_no_such_panel(tmp_path: Path) -> None:
    run = report_run(tmp_path / "dense", samples=2, length=16)
    assert 'id="routing"' not in run_page(load_source(str(run.folder), None))
