"""What one contract allows that another does not, and contracts that extend others."""

import re
from datetime import date
from pathlib import Path

import pytest
from comparisons import contract

from rlk_align.errors import ContractError
from rlk_align.judge.changes import changes, needed_version, version_is_enough
from rlk_align.judge.contract import Contract
from rlk_align.judge.load import open_contract

LIMIT = {"metric": "max_abs_dlogp", "warn": 0.05, "fail": 0.1}
SITES = {"metric": "rows_differ", "fail": 3}
TAIL = {"quantile": 0.99, "value": 0.03, "scale": 0.01, "chance": 1e-3}
BASE = contract(LIMIT, SITES)


def kinds(after: Contract, before: Contract = BASE) -> set[tuple[str, str]]:
    return {(c.kind, c.what) for c in changes(before, after)}


@pytest.mark.parametrize(
    ("after", "what"),
    [
        (contract(LIMIT | {"fail": 0.11}, SITES), "fail"),
        (contract(LIMIT | {"warn": 0.06}, SITES), "warn"),
        (contract({k: v for k, v in LIMIT.items() if k != "warn"}, SITES), "warn"),
        (contract(LIMIT | {"edges": ["decode_vs_train"]}, SITES), "edges"),
        (contract(LIMIT | {"min_tokens": 50}, SITES), "min_tokens"),
        (contract(LIMIT), "l1"),
        (contract(LIMIT, SITES | {"op_classes": ["matmul"]}), "op_classes"),
        (contract(LIMIT, SITES | {"sites": ["layers.0.*"]}), "sites"),
        (contract(LIMIT, SITES, min_coverage=0.8), "min_coverage"),
        (contract(LIMIT, SITES, max_noise=1e-3), "max_noise"),
        (
            contract(
                *(LIMIT, SITES),
                waivers=[{"limit": "l0", "owner": "o", "reason": "r", "expires": date(2030, 1, 1)}],
            ),
            "waiver",
        ),
    ],
)
def test_every_loosening_is_one_and_its_reverse_is_a_tightening(after: Contract, what: str) -> None:
    assert ("loosened", what) in kinds(after)
    assert ("tightened", what) in kinds(BASE, after)
    assert not any(kind == "loosened" for kind, _ in kinds(BASE, after))


def test_a_tail_tightens_and_its_loss_loosens() -> None:
    tailed = contract(LIMIT | {"tail": TAIL | {"value": 0.05}}, SITES)
    assert kinds(tailed) == set()
    tight = contract(LIMIT | {"tail": TAIL | {"value": 0.01}}, SITES)
    assert ("tightened", "fail at 100 tokens") in kinds(tight)
    assert ("loosened", "fail at 100 tokens") in kinds(BASE, tight)
    other = contract(LIMIT | {"metric": "p99_abs_dlogp"}, SITES)
    assert kinds(other) == kinds(BASE, other) == {("loosened", "metric")}


def test_budgets_and_regressions_are_compared_too() -> None:
    bf16 = open_contract("bf16")
    first, *rest = bf16.budgets
    looser = bf16.model_copy(update={"budgets": [first.model_copy(update={"rms": 1.0}), *rest]})
    assert [(c.kind, c.entry, c.what) for c in changes(bf16, looser)] == [
        ("loosened", first.id, "rms")
    ]
    assert ("loosened", first.id) in {
        (c.kind, c.what) for c in changes(bf16, bf16.model_copy(update={"budgets": rest}))
    }
    worse = {"id": "r", "metric": "k3", "factor": 1.5, "why": "w", "source": "s"}
    strict, loose = (contract(regressions=[worse | {"factor": factor}]) for factor in (1.5, 2.0))
    assert kinds(loose, strict) == {("loosened", "factor")}


def test_words_alone_are_a_rewording() -> None:
    assert kinds(contract(LIMIT | {"why": "another"}, SITES)) == {("reworded", "why")}
    assert kinds(BASE) == set()


def test_the_version_tells_what_kind_of_change_it_is() -> None:
    loose = changes(BASE, contract(LIMIT | {"fail": 0.2}, SITES))
    tight = changes(BASE, contract(LIMIT | {"fail": 0.09}, SITES))
    words = changes(BASE, contract(LIMIT | {"why": "another"}, SITES))
    assert needed_version(BASE, loose) == "2.0.0"
    assert needed_version(BASE, tight) == "1.1.0"
    assert needed_version(BASE, words) == "1.0.1"
    assert needed_version(BASE, []) == "1.0.0"
    minor = contract(LIMIT | {"fail": 0.2}, SITES, version="1.9.0")
    assert not version_is_enough(BASE, minor, loose)
    assert version_is_enough(BASE, contract(LIMIT, SITES, version="2.0.0"), loose)
    assert not version_is_enough(BASE, contract(LIMIT, SITES, version="1.0.9"), tight)


PARENT = """
id = "parent"
version = "1.2.0"
description = "d"
dtypes = ["bfloat16"]
min_coverage = 0.9
min_tokens = 10
[[limits]]
id = "max"
metric = "max_abs_dlogp"
fail = 0.1
why = "w"
source = "s"
[[limits]]
id = "k3"
metric = "k3"
fail = 0.001
why = "w"
source = "s"
"""


@pytest.fixture
def child(tmp_path: Path):
    (tmp_path / "parent.toml").write_text(PARENT)
    pin = open_contract(str(tmp_path / "parent.toml")).sha256

    def write(
        text: str = "", sha256: str = pin, version: str = "1.2.0", reason: str = "", head: str = ""
    ) -> str:
        path = tmp_path / "child.toml"
        path.write_text(
            f'id = "child"\nversion = "1.0.0"\n{head}\n[extends]\nid = "parent"\n'
            f'file = "parent.toml"\nversion = "{version}"\nsha256 = "{sha256}"\n{reason}\n{text}'
        )
        return str(path)

    return write


def test_a_child_says_what_it_changes_and_keeps_the_rest(child) -> None:
    contract = open_contract(child('[[limits]]\nid = "max"\nfail = 0.05'))
    assert (contract.id, contract.version, contract.min_tokens) == ("child", "1.0.0", 10)
    limits = [(x.id, x.fail, x.why) for x in contract.limits]
    assert limits == [("max", 0.05, "w"), ("k3", 0.001, "w")]
    more = (
        '[[limits]]\nid = "mean"\nmetric = "mean_abs_dlogp"\nfail = 0.01\nwhy = "w"\nsource = "s"'
    )
    assert [x.id for x in open_contract(child(more)).limits] == ["max", "k3", "mean"]


def test_loosening_wants_a_reason(child) -> None:
    looser = '[[limits]]\nid = "max"\nfail = 0.2'
    with pytest.raises(ContractError, match="max is looser than in parent") as error:
        open_contract(child(looser))
    assert "reason" in error.value.fix
    assert open_contract(child(looser + '\nreason = "longer prompts"')).limits[0].fail == 0.2
    with pytest.raises(ContractError, match="the head is looser"):
        open_contract(child(head="min_tokens = 5"))
    assert open_contract(child(head="min_tokens = 5", reason='reason = "few"')).min_tokens == 5


def test_the_parent_is_pinned(child, tmp_path: Path) -> None:
    for wrong in ({"sha256": "0" * 64}, {"version": "1.1.0"}):
        with pytest.raises(ContractError, match="extends parent with"):
            open_contract(child(**wrong))
    path = child()
    (tmp_path / "parent.toml").write_text(PARENT.replace("0.001", "0.002"))
    with pytest.raises(ContractError, match="sha256"):
        open_contract(path)
    (tmp_path / "parent.toml").unlink()
    with pytest.raises(ContractError, match="does not exist"):
        open_contract(path)


def test_a_contract_that_extends_itself(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(
        f'id = "a"\nversion = "1.0.0"\n[extends]\nid = "a"\nfile = "a.toml"\nversion = "1.0.0"\n'
        f'sha256 = "{"0" * 64}"\n'
    )
    with pytest.raises(ContractError, match="extends itself"):
        open_contract(str(path))
    path.write_text('id = "a"\nversion = "1.0.0"\nextends = "bf16"\n')
    with pytest.raises(ContractError, match="extends"):
        open_contract(str(path))


def test_a_built_in_contract_can_be_extended(tmp_path: Path) -> None:
    bf16 = open_contract("bf16")
    path = tmp_path / "ours.toml"
    path.write_text(
        f'id = "ours"\nversion = "1.0.0"\n[extends]\nid = "bf16"\nversion = "{bf16.version}"\n'
        f'sha256 = "{bf16.sha256}"\n[[limits]]\nid = "noise"\nfail = 0.05\n'
    )
    contract = open_contract(str(path))
    assert contract.budgets == bf16.budgets
    assert next(x for x in contract.limits if x.id == "noise").fail == 0.05


def test_the_contract_that_the_page_shows_is_one(tmp_path: Path) -> None:
    """With a waiver, which is looser than its parent and has a reason of its own."""
    page = (Path(__file__).parents[2] / "docs" / "contracts.md").read_text()
    (shown,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    path = tmp_path / "ours.toml"
    path.write_text(shown.replace("…", open_contract("bf16").sha256))
    contract = open_contract(str(path))
    assert [w.owner for w in contract.waivers] == ["ada"]
    assert next(x for x in contract.limits if x.id == "noise").fail == 0.06
