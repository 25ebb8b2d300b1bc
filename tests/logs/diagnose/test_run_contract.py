"""The contract for runs: its content, and errors in other contracts."""

from collections.abc import Callable
from pathlib import Path

import pytest
from simulate_dumps import healthy

from rlk_align.data import data_path
from rlk_align.errors import ContractError
from rlk_align.judge.load import open_contract
from rlk_align.logs.diagnose.contract import RunContract, load_run_contract
from rlk_align.logs.diagnose.explain import explain

SHIPPED = (data_path("contracts") / "run.toml").read_text(encoding="utf-8")


TAIL = "tail = { quantile = 0.99, value = 20, scale = 12, chance = 1e-3 }"


def single_tokens(text: str) -> list[str]:
    """The limits of single-token in a contract's text."""
    parts = text.split("[[limits]]")
    return [f"[[limits]]{x}" for x in parts if 'diagnosis = "single-token"' in x]


def without(text: str, parts: list[str]) -> str:
    for part in parts:
        text = text.replace(part, "")
    return text


def test_the_shipped_one_gives_each_limit_a_source() -> None:
    contract = load_run_contract()
    kinds = ("published: ", "measured: ", "derived: ")
    assert all(x.source.startswith(kinds) for x in (*contract.limits, *contract.steps))
    assert all(x.source.startswith((*kinds, "chosen: ")) for x in contract.thresholds)
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
        (
            lambda t: t.replace('dtype = "float16"\n', ""),
            "quantisation float16 is missing.* quantisation is unknown.* single-token is unknown",
        ),
        (lambda t: t.replace('kind = "run"\n', ""), "kind"),
        (lambda t: t.replace('"rope.one-step"', '"rope.two-steps"'), "'rope.two-steps' is unknown"),
        (lambda t: t.replace('"rope.one-step"', '"line.even"'), "'line.even' is given twice"),
        (lambda t: t.replace("value = 2.5\n", "value = inf\n"), "thresholds.5.value"),
        (lambda t: t.replace("floor = 0.01\n", "", 1), "a floor belongs"),
        (lambda t: t.replace('"dropout"\n', '"dropout"\nfloor = 0.01\n', 1), "a floor belongs"),
        (lambda t: t.replace(single_tokens(t)[0], ""), "in some dtypes"),
        (lambda t: without(t, single_tokens(t)), "the step 'single-token' needs"),
        (lambda t: t.replace("fail = 1.5\n", f"fail = 1.5\n{TAIL}\n", 1), "a tail belongs"),
        (lambda t: t + "[[limits]", "not TOML"),
        (lambda _: "", "required fields are missing"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: Callable[[str], str], said: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(change(SHIPPED), encoding="utf-8")
    with pytest.raises(ContractError, match=said):
        load_run_contract(str(path))


def test_a_contract_without_thresholds_uses_the_built_in_ones() -> None:
    shipped = load_run_contract()
    earlier = RunContract.model_validate(shipped.model_dump() | {"thresholds": []})
    names = [x.name for x in shipped.thresholds]
    assert [earlier.threshold(x) for x in names] == [shipped.threshold(x) for x in names]
    assert earlier.sha256 != shipped.sha256


def test_a_threshold_of_ones_own_decides() -> None:
    shipped, run = load_run_contract(), healthy(0, 20_000)
    own = [x for x in shipped.thresholds if x.name == "routing.factor"]
    own = [x.model_copy(update={"value": 1.5}) for x in own]
    sensitive = RunContract.model_validate(shipped.model_dump() | {"thresholds": own})
    assert explain([run], shipped).exit_code == 0
    found = explain([run], sensitive).diagnoses[0]
    assert found.name == "routing"
    assert "more than 1.5 times the median" in found.statistic


@pytest.mark.parametrize("name", ["bf16", "nope", "nope.toml", "../contracts/run"])
def test_what_is_no_contract_for_runs(name: str) -> None:
    with pytest.raises(ContractError, match="unknown contract for runs"):
        load_run_contract(name)


def test_one_of_engines_is_refused() -> None:
    with pytest.raises(ContractError, match="kind"):
        load_run_contract(str(data_path("contracts") / "bf16.toml"))
