"""Faults of other kinds and sizes than those that the diagnoses were tuned on."""

import pytest
from fault_variants import VARIANTS, variant

from rlk_align.logs.diagnose.contract import load_run_contract
from rlk_align.logs.diagnose.explain import explain

CONTRACT = load_run_contract()
NOT_ALWAYS = {"noise × 3", "packs of 8", "last turn, 1 row in 5"}
"""Faults that so few tokens do not always prove; they are never named otherwise."""


@pytest.mark.parametrize("name", VARIANTS)
def test_it_is_named(name: str) -> None:
    found = explain([variant(name, 1, 10_000)], CONTRACT)
    names = [d.name for d in found.diagnoses[:1]]
    assert names == [VARIANTS[name].diagnosis] or (name in NOT_ALWAYS and names == [])
    assert found.status != "pass"
