"""Contracts that say something else than they seem to: refused in one clear line."""

from pathlib import Path

import pytest

from rlk_align.data import data_path
from rlk_align.errors import ContractError
from rlk_align.judge.load import load_contract

WHOLE = """
id = "mine"
version = "1.0.0"
description = "a contract"
dtypes = ["bfloat16"]
min_coverage = 0.9
min_tokens = 32

[[limits]]
id = "max-dlogp"
metric = "max_abs_dlogp"
fail = 0.06
why = "a reason"
source = "measured: here"
"""


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return str(path)


def test_the_whole_one_is_taken_and_known_by_its_path(tmp_path: Path) -> None:
    name = written(tmp_path, WHOLE)
    contract = load_contract(name, "bfloat16")
    assert (contract.id, contract.reference) == ("mine", name)
    assert load_contract(written(tmp_path, WHOLE.replace("0.06", "1")), "bfloat16").limits
    assert load_contract("bf16", "bfloat16").reference == "bf16"


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("fail = 0.06", 'fail = "0.06"', "limits.0.fail"),
        ("fail = 0.06", "fail = true", "limits.0.fail"),
        ("fail = 0.06", "fail = nan", "limits.0.fail"),
        ("fail = 0.06", "fail = -1.0", "limits.0.fail"),
        ("min_tokens = 32", "min_tokens = 32.0", "min_tokens"),
        ("min_tokens = 32", 'min_tokens = "32"', "min_tokens"),
        ("min_coverage = 0.9", "min_coverage = true", "min_coverage"),
        ('why = "a reason"', 'why = ""', "limits.0.why"),
        ('why = "a reason"', 'why = "  "', "limits.0.why"),
        ('source = "measured: here"', 'source = ""', "limits.0.source"),
        ('id = "mine"', 'id = ""', "id"),
        ('id = "mine"', 'id = "my\\u001b[31m contract"', "id"),
        ('id = "max-dlogp"', 'id = ""', "limits.0.id"),
        ('dtypes = ["bfloat16"]', "dtypes = []", "dtypes"),
        ('dtypes = ["bfloat16"]', 'dtypes = ["bf16"]', "dtypes.0"),
        ('dtypes = ["bfloat16"]', 'dtypes = "bfloat16"', "dtypes"),
        ('metric = "max_abs_dlogp"', 'metric = "op_error"', "atol and rtol belong to op_error"),
    ],
)
def test_what_is_off_is_named(tmp_path: Path, old: str, new: str, word: str) -> None:
    assert old in WHOLE
    with pytest.raises(ContractError) as error:
        load_contract(written(tmp_path, WHOLE.replace(old, new)), "bfloat16")
    said = error.value.message
    assert word in said
    assert "http" not in said
    assert ": :" not in said
    assert "\n" not in said


def test_the_id_of_a_built_in_contract_is_its_own(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="belongs to a built-in contract"):
        load_contract(written(tmp_path, WHOLE.replace('"mine"', '"bf16"')), "bfloat16")
    same = (data_path("contracts") / "bf16.toml").read_text(encoding="utf-8")
    assert load_contract(written(tmp_path, f"# a copy\n{same}"), "bfloat16").id == "bf16"
