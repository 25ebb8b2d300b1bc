"""`rlk-align explain` on imported runs, good and bad."""

import dataclasses
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from command import Cli
from imported_runs import imported_run
from simulate_dumps import faulty, healthy

from rlk_align.logs.diagnose.advice import NEXT
from rlk_align.logs.diagnose.record import Name

FIELDS = {
    *("schema", "status", "exit_code", "contract", "model", "dtype", "tokens", "engines"),
    *("precheck", "controls", "coverage", "edges", "divergence", "divergences", "breaches"),
}
"""Of every record `rlk-align/verdict/1`."""


def test_a_healthy_run_passes(cli: Cli, tmp_path: Path) -> None:
    run = healthy(1, 20_000)
    imported_run(run, tmp_path / "run")
    done = cli("explain", "run")
    assert done.code == 0, done.err
    assert "PASS  The two sides agree within ordinary rounding." in done.out
    assert "a dump cannot tell" in done.out
    assert done.verdict is not None
    assert done.verdict.keys() >= FIELDS
    assert done.verdict["schema"] == "rlk-align/verdict/1"
    assert done.verdict["tokens"] == int(run.compared.sum())
    (only,) = done.verdict["diagnoses"]
    assert only["name"] == "numerics"
    assert {"statistic", "value", "low", "high", "confidence", "samples", "next"} <= only.keys()


@pytest.mark.parametrize(
    ("fault", "name", "code"),
    [
        ("T on the rollout only", "temperature", 1),
        ("mask one early", "mask-shifted", 1),
        ("decode broken", "decode-state", 1),
        ("state leaks in packs", "packing", 1),
        ("copied", "vacuous", 4),
        ("empty mask", "vacuous", 4),
    ],
)
def test_a_faulty_run_is_named(cli: Cli, tmp_path: Path, fault: str, name: str, code: int) -> None:
    imported_run(faulty(fault, 1, 20_000), tmp_path / "a run")
    done = cli("explain", "a run", "--output", "markdown=page.md")
    assert done.code == code, done.err
    assert f"verdict: {name}" in done.out
    assert done.verdict is not None
    assert done.verdict["exit_code"] == code
    assert done.verdict["diagnoses"][0]["name"] == name
    assert f"### verdict: {name}" in (tmp_path / "page.md").read_text(encoding="utf-8")
    advice = done.verdict["diagnoses"][0]["next"]
    assert ("'a run'" in advice) == ("{RUN}" in NEXT[name])
    assert "RUN" not in advice


def test_names_from_a_file_are_escaped(cli: Cli, tmp_path: Path) -> None:
    run = healthy(1, 2_000)
    evil = dataclasses.replace(run, ids=[f"[red]\x1b[31m|`{k}`\u202e" for k in range(len(run))])
    imported_run(evil, tmp_path / "run")
    done = cli("explain", "run", "--output", "markdown=page.md")
    assert done.code == 0
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    for text in (done.out, page):
        assert "\x1b" not in text
        assert "\u202e" not in text
    assert "[red]\\x1b[31m" in done.out
    assert "|`0`" not in page


def test_a_value_that_is_not_finite_is_null_in_json(cli: Cli, tmp_path: Path) -> None:
    run = healthy(1, 2_000)
    run.train[np.flatnonzero(run.compared)[5]] = np.nan
    imported_run(run, tmp_path / "run")
    done = cli("explain", "run")
    assert done.code == 1
    assert done.verdict is not None
    assert done.verdict["diagnoses"][0]["name"] == "missing"
    assert done.verdict["diagnoses"][0]["samples"][0]["train"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nowhere",), "nowhere"),
        (("run", "--contract", "bf16"), "unknown contract for runs: 'bf16'"),
        (("run", "--contract", "no.toml"), "unknown contract for runs"),
        (("run", "--output", "xml=a"), "FMT"),
        (("run", "--output", "markdown=run/dump.json"), "dump.json"),
    ],
)
def test_bad_usage(cli: Cli, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    imported_run(healthy(1, 2_000), tmp_path / "run")
    done = cli("explain", *words)
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err


def test_a_changed_table_is_refused(cli: Cli, tmp_path: Path) -> None:
    imported_run(healthy(1, 2_000), tmp_path / "run")
    table = tmp_path / "run" / "logprobs.parquet"
    data = bytearray(table.read_bytes())
    data[len(data) // 2] ^= 1
    table.write_bytes(data)
    done = cli("explain", "run")
    assert done.code == 3
    assert "Traceback" not in done.err


@pytest.mark.parametrize(("fault", "code"), [(None, 0), ("T on the rollout only", 1)])
def test_gate_and_compare_judge_an_imported_run_alike(
    cli: Cli, tmp_path: Path, fault: str | None, code: int
) -> None:
    run = healthy(1, 20_000) if fault is None else faulty(fault, 1, 20_000)
    imported_run(run, tmp_path / "run")
    explained = cli("explain", "run")
    for command in ("gate", "compare"):
        done = cli(command, "run")
        assert (explained.code, done.code) == (code, code), done.err
        assert done.verdict == explained.verdict
        assert done.out == explained.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("compare", "run", "run"), "rlk-align explain run compares its two sides"),
        (("compare", "run", "--train", "hf"), "rlk-align compare --tokens run --train SPEC"),
        (("compare", "run", "--probe"), "rlk-align compare --tokens run --train SPEC"),
        (("gate", "run", "run"), "rlk-align explain run compares its two sides"),
        (("compare", "--rollout", "replay:path=run"), "rlk-align compare --tokens run"),
    ],
)
def test_an_imported_run_is_no_engine(
    cli: Cli, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    imported_run(healthy(1, 2_000), tmp_path / "run")
    done = cli(*words)
    assert done.code == 2
    assert said in " ".join(done.err.split())
    assert "Traceback" not in done.err


def test_the_page_of_mismatches_lists_every_diagnosis() -> None:
    page = (Path(__file__).parents[2] / "docs" / "mismatch.md").read_text(encoding="utf-8")
    assert [name for name in get_args(Name) if f"\n| `{name}` |" not in page] == []
