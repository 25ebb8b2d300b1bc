"""The contract for runs: what it holds, and what is wrong with others."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rlk_align.data import data_path
from rlk_align.errors import ContractError
from rlk_align.judge.load import open_contract
from rlk_align.logs.diagnose.contract import load_run_contract

SHIPPED = (data_path("contracts") / "run.toml").read_text(encoding="utf-8")


def test_the_shipped_one_gives_each_limit_a_source() -> None:
    contract = load_run_contract()
    kinds = ("published: ", "measured: ", "derived: ")
    assert all(x.source.startswith(kinds) for x in (*contract.limits, *contract.steps))
    assert all(x.healthy is None or x.healthy <= x.fail for x in contract.limits)
    assert len(contract.sha256) == 64


def test_it_is_no_contract_of_engines() -> None:
    with pytest.raises(ContractError, match="no contract 'run'"):
        open_contract("run")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.replace("fail = 0.02\n", 'fail = "0.02"\n'), "limits.1.fail"),
        (lambda t: t.replace("fail = 0.02\n", "fail = nan\n"), "limits.1.fail"),
        (lambda t: t.replace('"mask-shifted"', '"mask-shift"'), "limits.1.diagnosis"),
        (lambda t: t.replace('diagnosis = "rope"', 'diagnosis = "packing"'), "given twice"),
        (lambda t: t.replace('dtype = "float16"\n', ""), "quantisation"),
        (lambda t: t.replace('kind = "run"\n', ""), "kind"),
        (lambda t: t + "[[limits]", "not TOML"),
        (lambda _: "", "required fields are missing"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: Callable[[str], str], said: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(change(SHIPPED), encoding="utf-8")
    with pytest.raises(ContractError, match=said):
        load_run_contract(str(path))


@pytest.mark.parametrize("name", ["bf16", "nope", "nope.toml", "../contracts/run"])
def test_what_is_no_contract_for_runs(name: str) -> None:
    with pytest.raises(ContractError, match="unknown contract for runs"):
        load_run_contract(name)


def test_one_of_engines_is_refused() -> None:
    with pytest.raises(ContractError, match="kind"):
        load_run_contract(str(data_path("contracts") / "bf16.toml"))
