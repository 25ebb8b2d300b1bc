"""Faults of other kinds and sizes than those that the diagnoses were tuned on."""

import pytest
from explained import explained
from fault_variants import VARIANTS, variant

NOT_ALWAYS = {"noise × 3", "packs of 8", "last turn, 1 row in 5"}
"""Faults that so few tokens do not always prove; they are never named otherwise."""


@pytest.mark.parametrize("name", VARIANTS)
def test_it_is_named(name: str) -> None:
    found = explained(variant(name, 1, 10_000))
    names = [d.name for d in found.diagnoses[:1]]
    assert names == [VARIANTS[name].diagnosis] or (name in NOT_ALWAYS and names == [])
    assert found.status != "pass"
