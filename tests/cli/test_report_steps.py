"""`rlk-align report` of imported runs: what is explained of one, and their steps."""

import dataclasses
import html
from pathlib import Path

import pytest
from imported_runs import imported_run
from simulate_dumps import Dump, faulty, healthy


def test_an_imported_run_is_shown_over_its_steps(tmp_path: Path, cli) -> None:
    runs = [tmp_path / name for name in ("first", "second")]
    for seed, run in enumerate(runs):
        imported_run(Dump(seed, 2_000, steps=5).sequences_of(), run)
    page = tmp_path / "page.html"
    done = cli("report", "html", *runs, "-o", page)
    assert done.code == 0, done.err
    text = page.read_text()
    assert all(str(run) in text for run in runs)
    assert "k2, scaled by" in text


@pytest.mark.parametrize("fault", [None, "T on the rollout only", "empty mask"])
def test_one_imported_run_has_its_diagnoses_beside_its_steps(
    tmp_path: Path, cli, fault: str | None
) -> None:
    run = healthy(1, 2_000) if fault is None else faulty(fault, 1, 2_000)
    evil = [f"<b>{k}\u202e" for k in range(len(run))]
    imported_run(dataclasses.replace(run, ids=evil), tmp_path / "run")
    done = cli("report", "html", "run", "-o", "page.html")
    assert done.code == 0, done.err
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    explained = cli("explain", "run").verdict
    assert explained["status"].upper() in page
    (first, *_) = explained["diagnoses"]
    assert f"{first['name']}, confidence {first['confidence']}" in page
    assert f"{first['value']:.4g}" in page
    assert html.escape(first["next"], quote=False) in html.unescape(page)
    for token in first["samples"]:
        assert f"{token['rollout']:.4f}" in page
    if first["samples"]:
        assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert "\u202e" not in page
    assert "Over the steps" in page
    assert 'id="r0-noise"' in page or fault == "empty mask"


def test_markdown_of_an_imported_run_is_what_explain_writes(tmp_path: Path, cli) -> None:
    imported_run(faulty("mask one early", 1, 2_000), tmp_path / "run")
    assert cli("report", "markdown", "run", "-o", "a.md").code == 0
    assert cli("explain", "run", "--output", "markdown=b.md").code == 1
    a, b = ((tmp_path / name).read_text(encoding="utf-8") for name in ("a.md", "b.md"))
    assert a == b
    assert "mask-shifted" in a


def test_the_page_is_no_file_of_the_run(tmp_path: Path, cli) -> None:
    run = tmp_path / "run"
    imported_run(Dump(0, 2_000).sequences_of(), run)
    done = cli("report", "html", run, "-o", run / "dump.json")
    assert done.code == 2
    assert "Traceback" not in done.err
