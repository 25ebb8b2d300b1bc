"""`rlk-align contract`, and `gate` with two runs, as users call them."""

import json
import shutil
from pathlib import Path

import pytest
from command import Cli
from synthetic import FIRST_EDGE, compared_run, corrupt, draw

CONTRACTS = ("bf16", "fp16", "fp32", "bitwise", "bf16-statistical", "ws1")


@pytest.mark.parametrize("name", CONTRACTS)
def test_show_tells_every_limit_with_its_source(cli: Cli, name: str) -> None:
    done = cli("contract", "show", name)
    assert done.code == 0, done.err
    assert f"{name} " in done.out
    assert "sha256" in done.out
    assert done.out.count("  why ") == done.out.count("  source ") > 0


def test_check_passes_ours_and_finds_the_vacuous_gate_of_ws1(cli: Cli) -> None:
    for name in CONTRACTS:
        done = cli("contract", "check", name)
        assert done.code == (1 if name == "ws1" else 0), done.out
        if name == "ws1":
            assert "a limit of 0.05 can never fire" in done.out


@pytest.fixture
def write_contract(tmp_path: Path):
    def write(name: str, fail: float, version: str = "1.0.0", more: str = "") -> Path:
        path = tmp_path / f"{name}.toml"
        path.write_text(
            f'id = "ours"\nversion = "{version}"\ndescription = "d"\ndtypes = ["bfloat16"]\n'
            f'min_coverage = 0.9\nmin_tokens = 1\n[[limits]]\nid = "max"\n'
            f'metric = "max_abs_dlogp"\nfail = {fail}\nwhy = "w"\nsource = "s"\n{more}'
        )
        return path

    return write


def test_diff_stops_a_loosened_limit_and_a_version_that_hides_a_change(
    cli: Cli, write_contract
) -> None:
    base, loose = write_contract("base", 0.1), write_contract("loose", 0.2, "2.0.0")
    done = cli("contract", "diff", base, loose)
    assert done.code == 1
    assert "loosened" in done.out
    assert "fail: 0.1 → 0.2" in done.out
    assert cli("contract", "diff", base, write_contract("tight", 0.05, "1.1.0")).code == 0
    hidden = cli("contract", "diff", base, write_contract("hidden", 0.05))
    assert hidden.code == 1
    assert "need 1.1.0" in hidden.out
    same = cli("contract", "diff", base, base)
    assert (same.code, same.out.strip()) == (0, "no difference")


def test_schema_is_json_that_editors_read(cli: Cli) -> None:
    schema = json.loads(cli("contract", "schema").out)
    assert schema["type"] == "object"
    assert "limits" in schema["required"]


def test_a_contract_that_is_not_there_is_a_usage_error(cli: Cli) -> None:
    for command in ("show", "check"):
        done = cli("contract", command, "nope")
        assert done.code == 2
        assert "built in: " in done.err


def test_calibrate_refuses_too_few_runs_and_writes_nothing_under_ci(
    cli: Cli, write_contract, tmp_path: Path
) -> None:
    compared_run(tmp_path / "run")
    few = cli("contract", "calibrate", tmp_path / "run", "--base", write_contract("ours", 100))
    assert few.code == 2
    assert "too few" in few.err
    short = cli("contract", "calibrate", tmp_path / "run", "--base", "bf16")
    assert short.code == 2
    assert "run is inconclusive: prefill_vs_train: 15 sampled tokens, 32 are needed" in short.err
    out = tmp_path / "out.toml"
    refused = cli(
        *("contract", "calibrate", tmp_path / "run", "--base", "bf16", "-o", out),
        env={"CI": "true"},
    )
    assert refused.code == 2
    assert "under CI" in refused.err
    assert not out.exists()


REGRESSION = """
[[regressions]]
id = "bits"
metric = "rows_differ"
why = "w"
source = "s"
"""


def test_gate_of_two_runs_names_the_operator_that_became_worse(
    cli: Cli, write_contract, tmp_path: Path
) -> None:
    values = draw()
    compared_run(tmp_path / "before")
    compared_run(tmp_path / "after", corrupt(values, "layers.1.act", [(0, 2)]), FIRST_EDGE, values)
    contract = write_contract("ours", 100, more=REGRESSION)
    out = tmp_path / "r.json"
    args = ("--contract", contract, "--output", f"json={out}")
    worse = cli("gate", tmp_path / "before", tmp_path / "after", *args)
    assert worse.code == 1, worse.err
    assert "layers.1.act" in worse.out
    record = json.loads(out.read_text())
    assert (record["schema"], record["status"]) == ("rlk-align/regression/1", "fail")
    first = next(c for c in record["checks"] if not c["holds"])
    assert (first["site"], first["before"]) == ("layers.1.act", 0.0)
    better = cli("gate", tmp_path / "after", tmp_path / "before", *args)
    assert better.code == 0, better.out
    same = cli("gate", tmp_path / "before", tmp_path / "before", *args)
    assert same.code == 0
    none = cli("gate", tmp_path / "before", tmp_path / "after", "--contract", "bitwise")
    assert none.code == 2
    assert "regression limits" in none.err
    shutil.rmtree(tmp_path / "after" / "captures")
    gone = cli("gate", tmp_path / "before", tmp_path / "after", *args)
    assert gone.code == 3
