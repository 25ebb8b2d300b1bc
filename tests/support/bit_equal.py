"""Assertions on a comparison of engines that compute the same bits."""

from collections.abc import Callable
from typing import Any

from command import Outcome

from rlk_align.model.edges import EDGES

Bits = Callable[..., dict[str, dict[str, Any]]]
"""Cases of `vllm_bits.py` -> what it said of each."""


def assert_equal(done: Outcome, tokens: int, sparse: bool = False) -> None:
    """No bit differs on any edge, at any site of any row, of more than `tokens` tokens; in a sparse
    model every token goes to the same experts."""
    assert done.code == 0, done.out + done.err
    verdict = done.verdict
    assert verdict is not None
    assert done.first is None
    assert verdict["tokens"] > tokens
    assert set(verdict["edges"]) == set(EDGES)
    for edge in verdict["edges"].values():
        assert edge["tokens"] == verdict["tokens"]
        assert edge["bit_mismatches"] == 0
        assert edge["max_abs_dlogp"] == 0.0
        assert edge["ratio_mean"] == edge["ratio_max"] == 1.0
    coverage = verdict["coverage"]
    assert coverage["paired"] == coverage["expected"] > 100 * tokens
    assert coverage["unpaired"] == []
    assert set(verdict.get("routing", {})) == (set(verdict["edges"]) if sparse else set())
    for routing in verdict.get("routing", {}).values():
        assert routing["tokens"] > tokens
        assert routing["flipped_tokens"] == 0
