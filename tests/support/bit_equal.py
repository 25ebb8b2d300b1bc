"""Assertions on a comparison of engines that compute the same bits."""

from collections.abc import Callable
from typing import Any

from command import Outcome

Bits = Callable[..., dict[str, dict[str, Any]]]
"""Cases of `vllm_bits.py` -> what it said of each."""

THREE = {"decode_vs_prefill", "prefill_vs_train", "decode_vs_train"}
"""All edges."""


def assert_equal(done: Outcome, tokens: int, edges: set[str] = THREE) -> None:
    """No bit differs, at any site of any row, of more than `tokens` tokens."""
    assert done.code == 0, done.out + done.err
    assert done.verdict is not None
    assert done.first is None
    assert done.verdict["tokens"] > tokens
    assert set(done.verdict["edges"]) == edges
    for edge in done.verdict["edges"].values():
        assert edge["tokens"] == done.verdict["tokens"]
        assert edge["bit_mismatches"] == 0
        assert edge["max_abs_dlogp"] == 0.0
        assert edge["ratio_max"] == 1.0
    coverage = done.verdict["coverage"]
    assert coverage["paired"] == coverage["expected"] > 300 * tokens
    assert coverage["unpaired"] == []
