"""`rlk-align report html` of imported runs: their steps."""

from pathlib import Path

from imported_runs import imported_run
from simulate_dumps import Dump


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


def test_the_page_is_no_file_of_the_run(tmp_path: Path, cli) -> None:
    run = tmp_path / "run"
    imported_run(Dump(0, 2_000).sequences_of(), run)
    done = cli("report", "html", run, "-o", run / "dump.json")
    assert done.code == 2
    assert "Traceback" not in done.err
