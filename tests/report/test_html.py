"""The HTML page: what is on it, that it is the same each time, small enough and soon there."""

import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from report_runs import HOSTILE, hostile_engines, hostile_mismatch, report_run
from synthetic import CONTRACT, compared_run

from rlk_align.data import data_path
from rlk_align.errors import CorruptTrace
from rlk_align.report.html.page import run_page
from rlk_align.report.html.samples import Stretch
from rlk_align.report.html.several import several_page
from rlk_align.report.html.tokens import delta_ramp, error_ramp, sample_view
from rlk_align.report.source import load_source
from rlk_align.results import Controls, Noise
from rlk_align.trace.run import Run

OVER = "layers.1.act"


def page(run: Run, contract: str | None = None) -> str:
    return run_page(load_source(str(run.folder), contract))


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return report_run(tmp_path_factory.mktemp("runs") / "healthy")


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return report_run(tmp_path_factory.mktemp("runs") / "failing", over=[OVER])


def section(text: str, name: str) -> str:
    """From a section's heading to the next one's."""
    found = re.search(rf'<h2 id="{name}">.*?(?=<h2 id=|</main>)', text, re.DOTALL)
    assert found, name
    return found[0]


def test_the_card_says_what_is_wrong_on_which_side_and_what_to_do(failing: Run) -> None:
    card = section(page(failing), "verdict")
    assert "✕ FAIL" in card
    assert f"{OVER} is further from exact than rounding explains" in card
    assert "the training side is off" in card
    assert f"check {OVER} on the train side" in card
    for name in ("worst", "coverage", "controls", "reproduce"):
        assert f"<dt>{name}</dt>" in card


def test_a_pass_says_what_it_rests_on(healthy: Run) -> None:
    card = section(page(healthy), "verdict")
    assert "✓ PASS" in card
    assert "No operator that was recomputed is further from exact" in card


def test_the_parts_come_in_the_order_of_a_readers_questions(failing: Run) -> None:
    found = re.findall(r'<h2 id="([\w-]+)">', page(failing))
    assert found == [
        *("verdict", "problems", "provenance", "drift", "heatmap", "tokens", "logprobs"),
        *("operators", "unpaired", "waivers"),
    ]


def test_each_chart_has_a_title_a_description_and_its_data(failing: Run) -> None:
    text = page(failing)
    charts = re.findall(r"<figure>.*?</figure>", text, re.DOTALL)
    assert len(charts) > 5
    for chart in charts:
        assert re.search(r'<svg id="[^"]+"[^>]*aria-labelledby', chart)
        assert re.search(r"<title id=[^>]+>[^<]+</title><desc id=[^>]+>[^<]+</desc>", chart)
        assert re.search(r"<details class=\"data\">.*<table.*<td", chart, re.DOTALL)


def test_introduced_and_inherited_are_told_apart_where_probed(failing: Run, tmp_path: Path) -> None:
    drift = section(page(failing), "drift")
    assert 'class="diamond s0"' in drift
    assert 'class="ring s0"' in drift
    assert "✕ off: layers.1.act" in drift
    unprobed = section(page(report_run(tmp_path / "unprobed", probed=False)), "drift")
    assert 'class="diamond' not in unprobed
    assert "Not probed" in unprobed


def test_four_answers_are_given(failing: Run, tmp_path: Path) -> None:
    drift = section(page(failing), "drift")
    wanted = {
        "where drift starts": "layers.0.attn_norm, first at sample 0, position 0",
        "first beyond its budget": f"{OVER}: the training side is off",
        "contributes most to Δlogp": "unknown; find out with: rlk-align probe RUN --attribute",
        "amplifies most": ", × 2; one ulp at embed moves log-probs by up to 0.08",
    }
    for question, answer in wanted.items():
        [given] = re.findall(rf"<dt>{re.escape(question)}</dt><dd>(.*?)</dd>", drift)
        assert answer in given


def test_every_operator_is_a_row_and_a_cell(failing: Run) -> None:
    text = page(failing)
    count = len(failing.comparison.edges[0].sites)
    assert len(re.findall(r'<tr id="op-\d+"', text)) == count
    assert len(re.findall(r'<a [^>]*id="cell-\d+"', text)) == count
    assert len(re.findall(r'<tr id="op-\d+"[^>]*data-state="over"', text)) == 1


def written(run: Run, path: Path) -> float:
    """Writes the page as users do, start-up included; how many seconds it took."""
    code = (
        "import sys, rlk_align.cli.main as m; sys.argv[0] = 'rlk-align'\n"
        "try: m.main()\n"
        "finally: print('TORCH', 'torch' in sys.modules)\n"
    )
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-c", code, "report", "html", str(run.folder), "-o", str(path)],
        capture_output=True,
        text=True,
    )
    assert "TORCH False" in done.stdout, done.stderr
    return seconds(before)


def seconds(before: os.times_result) -> float:
    """Of processors that child processes took since: a busy machine is no fault of theirs."""
    now = os.times()
    return now.children_user + now.children_system - before.children_user - before.children_system


def test_a_run_of_36_layers_fits(tmp_path: Path) -> None:
    run = report_run(tmp_path / "deep", layers=36, samples=16, length=400, over=["layers.20.act"])
    path = tmp_path / "deep.html"
    assert written(run, path) < 10
    size = path.stat().st_size
    assert 1e6 < size < 5 * 2**20, size
    assert "layer 35" in path.read_text(encoding="utf-8")


def test_a_page_of_the_embedded_runs_size_is_there_in_time(tmp_path: Path) -> None:
    run = report_run(tmp_path / "run", layers=4, samples=64, length=113, over=[OVER])
    assert written(run, tmp_path / "page.html") < 5
    assert (tmp_path / "page.html").stat().st_size < 2 * 2**20


def test_a_small_run_is_small(failing: Run) -> None:
    assert len(page(failing).encode()) < 2**20


def test_the_policy_forbids_all_but_the_inline_parts(healthy: Run) -> None:
    import base64

    text = page(healthy)
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)
    assert policy.startswith("default-src &#39;none&#39;")
    for tag in ("style", "script"):
        [inside] = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src &#39;sha256-{digest}&#39;" in policy
    assert not re.search(r"<[a-z]+[^>]*\s(?:style|on\w+)=", text)
    assert not re.search(r"""(?:src|href)=["'](?!#)""", text)
    assert not re.search(r"@import|url\((?!#)", text)


def test_hostile_text_is_shown_as_text(tmp_path: Path) -> None:
    run = report_run(
        tmp_path / "<b>run & co",
        over=[OVER],
        text=HOSTILE,
        engines=hostile_engines(),
        mismatches=[hostile_mismatch()],
        allowed=["weights"],
        model=HOSTILE,
    )
    source = load_source(str(run.folder), None)
    for text in (run_page(source), several_page([source, source, source])):
        assert "<script>alert" not in text
        assert text.count("<script>") == text.count("</script>") == 1
        assert text.count("</style>") == 1
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
        assert "{{7*7}}" in text
        for raw in ("\x1b", "\u202e", "\x00", "<b>run"):
            assert raw not in text
        for shown in (r"\x1b[31m", r"\u202egpj.exe", "🦊", "مرحبا"):
            assert shown in text


def test_ranks_are_shown_where_there_are_several(tmp_path: Path, healthy: Run) -> None:
    run = report_run(
        tmp_path / "ranks",
        engines=hostile_engines(),
        mismatches=[hostile_mismatch()],
        allowed=["weights"],
    )
    ranks = section(page(run), "rankmap")
    assert ranks.count("✕ 1 differ") == 2
    assert ranks.count("= equal") == 2
    assert 'id="rankmap"' not in page(healthy)


def test_a_run_that_was_stopped_says_why(tmp_path: Path) -> None:
    run = report_run(tmp_path / "stopped", mismatches=[hostile_mismatch()], edges=[], controls=None)
    text = page(run)
    assert "The two sides have different inputs: weights" in section(text, "verdict")
    assert 'id="drift"' not in text
    several = several_page([load_source(str(run.folder), None)] * 2)
    assert "INCONCLUSIVE" in several


def test_a_run_without_rows_leaves_the_tokens_out_and_says_so(healthy: Run, tmp_path: Path) -> None:
    folder = tmp_path / "old"
    shutil.copytree(healthy.folder, folder)
    (folder / "comparison.parquet").unlink()
    sums = json.loads((folder / "checksums.json").read_text())
    del sums["files"]["comparison.parquet"]
    (folder / "checksums.json").write_text(json.dumps(sums))
    assert "keeps no rows" in section(page(Run(folder)), "tokens")


DAMAGES = [
    (name, damage)
    for name in (
        "comparison.json",
        "comparison.parquet",
        "probe.json",
        "run.json",
        "checksums.json",
    )
    for damage in ("cut", "gone")
    # A folder without run.json is no run at all: a usage error.
    if (name, damage) != ("run.json", "gone")
]


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_a_damaged_run_is_refused(healthy: Run, tmp_path: Path, name: str, damage: str) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(healthy.folder, folder)
    path = folder / name
    path.write_bytes(path.read_bytes()[:-20]) if damage == "cut" else path.unlink()
    with pytest.raises(CorruptTrace):
        load_source(str(folder), None)


def test_a_page_is_not_written_over_a_file_of_the_run(healthy: Run, cli) -> None:
    for path in (healthy.folder / "comparison.json", healthy.folder / "captures" / "page.html"):
        done = cli("report", "html", healthy.folder, "-o", path)
        assert done.code == 2
        assert "file of the run itself" in done.err
    nowhere = healthy.folder.parent / "nowhere" / "page.html"
    done = cli("report", "html", healthy.folder, "-o", nowhere)
    assert done.code == 2
    assert "no file can be written there" in done.err


def test_equal_sides_give_a_page_too(tmp_path: Path) -> None:
    run = compared_run(tmp_path / "equal")
    text = page(run, CONTRACT)
    assert "is bit-equal on both sides" in section(text, "verdict")
    assert "NaN" not in section(text, "drift")


def test_a_side_that_does_not_repeat_itself_is_drawn_so(tmp_path: Path) -> None:
    noise = Noise(
        passname="prefill", rows=3, first_site=OVER, max_abs_dlogp=0.002, mean_abs_dlogp=0.001
    )
    controls = Controls(
        observer="bitwise", observer_detail=[], noise={"rollout": noise, "train": None}
    )
    run = report_run(tmp_path / "noisy", noisy=[OVER], controls=controls)
    text = page(run)
    assert section(text, "drift").count('<rect x="') > section(text, "drift").count("noisy") > 1
    assert "rollout differs from itself by up to 0.002" in section(text, "verdict")
    assert "noise floor, ±0.002" in section(text, "logprobs")
    assert "no row drawn here is known to change" not in section(text, "drift")


def test_nan_is_drawn_and_never_as_a_number(tmp_path: Path) -> None:
    text = page(report_run(tmp_path / "nan", nan=["layers.1.mlp_residual"]))
    assert "✕ FAIL" in section(text, "verdict")
    drawn = re.findall(r'(?: d| x| y| cx| cy| width| height)="([^"]*)"', text)
    assert drawn
    assert not [value for value in drawn if "nan" in value or "inf" in value]
    assert 'class="bad"' in section(text, "heatmap")
    assert "NaN" in section(text, "tokens")


def with_waivers(folder: Path, run: Run, reason: str) -> str:
    """The built-in contract, with a waiver of every limit that the run breaks, until 2030-01-31."""
    broken = {b.limit for b in load_source(str(run.folder), None).verdict.breaches}
    assert broken
    text = data_path("contracts").joinpath("bf16.toml").read_text(encoding="utf-8")
    text = text.replace('id = "bf16"', 'id = "waiving"', 1)
    for limit in sorted(broken):
        text += f"""
[[waivers]]
limit = "{limit}"
owner = "Ada <ada@example.org>"
reason = {json.dumps(reason)}
expires = 2030-01-31
"""
    path = folder / "waiving.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_waivers_are_shown_with_the_days_that_are_left(
    failing: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contract = with_waivers(tmp_path, failing, "<script>the kernel is being mended</script>")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1895529600")  # 2030-01-25
    text = page(failing, contract)
    assert "✓ PASS" in section(text, "verdict")
    assert "Within the contract by waivers." in section(text, "verdict")
    assert "2 breaches are waived." in section(text, "verdict")
    waivers = section(text, "waivers")
    assert '<td class="num" data-v="6.0">6</td>' in waivers
    assert "Ada &lt;ada@example.org&gt;" in waivers
    assert "&lt;script&gt;the kernel is being mended" in waivers
    assert re.search(r'<tr id="op-\d+"[^>]*data-state="waived"', text)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1896134400")  # 2030-02-01
    text = page(failing, contract)
    assert "✕ FAIL" in section(text, "verdict")
    assert "expired 1 days ago" in section(text, "problems")
    assert '<td class="num" data-v="-1.0">-1</td>' in section(text, "waivers")


def test_of_a_long_sequence_its_worst_token_is_shown(tmp_path: Path) -> None:
    run = report_run(tmp_path / "long", length=4000, worst=3000)
    tokens = section(page(run), "tokens")
    assert re.search(r"sample 1: max \|Δlogp\| 0\.\d+, at position 3000", tokens)
    assert "[2840 tokens left out]" in tokens
    assert "[840 tokens left out]" in tokens
    assert len(re.findall("<bdi", tokens)) == 3 * 320


def test_a_line_is_broken_where_a_run_lacks_the_site(healthy: Run, tmp_path: Path) -> None:
    deeper = report_run(tmp_path / "deeper", layers=3, probed=False)
    text = several_page([load_source(str(r.folder), None) for r in (healthy, deeper)])
    lines = dict(re.findall(r'<path d="([^"]*)" class="line (s\d)"', text))
    moves = {run: path.count("M") for path, run in lines.items()}
    assert moves == {"s0": 2, "s1": 1}
    assert "A healthy: introduced here" in text
    assert "B deeper: introduced here" not in text


def test_two_runs_are_overlaid_and_more_are_small_multiples(healthy: Run, failing: Run) -> None:
    a, b = (load_source(str(run.folder), None) for run in (healthy, failing))
    two, three = several_page([a, b]), several_page([a, b, a])
    assert two.count('<svg id="drift-') == 1
    assert 'class="line s1"' in two
    assert three.count('<svg id="drift-') == 3
    scales = re.findall(r'<svg id="drift-[^"]+".*?</svg>', three, re.DOTALL)
    axes = [re.findall(r'class="label end">([^<]+)<', chart) for chart in scales]
    assert axes[0] == axes[1] == axes[2]
    assert "A healthy" in two
    assert "B failing" in two
    assert "✓ PASS" in two
    assert "✕ FAIL" in two


def test_a_token_is_underlined_by_its_sign_alone() -> None:
    """One that is equally likely on both sides, and a NaN, are neither."""
    count = 5
    stretch = Stretch(
        sample=0,
        positions=list(range(count)),
        ids=list(range(count)),
        texts=["a"] * count,
        sampled=[False] + [True] * 4,
        delta=[None, 0.0, 0.1, -0.1, math.nan],
        errors={},
        before=0,
        after=0,
    )
    view = sample_view(stretch, 0.5, delta_ramp([stretch]), error_ramp([stretch]))
    signs = [set(t.classes.split()) & {"up", "down"} for t in view.tokens]
    assert signs == [set(), set(), {"up"}, {"down"}, set()]
