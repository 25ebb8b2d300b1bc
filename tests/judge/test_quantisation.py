"""What quantisation does to log-probs is reported, and judged only by limits for its format."""

import math
from typing import Any

import pytest
from comparisons import comparison, contract, edge, metrics, site
from pydantic import ValidationError

from rlk_align.judge.changes import changes
from rlk_align.judge.verdict import judge
from rlk_align.results import Comparison

USUAL = {"metric": "mean_abs_dlogp", "fail": 0.01}
FP8 = {"metric": "mean_abs_dlogp", "fail": 0.1, "quantisation": "fp8-block"}
BOTH = ("decode_vs_prefill", "prefill_vs_train")


def quantised(size: float, **more: Any) -> Comparison:
    edges = [edge(name, metrics=metrics(mean_abs_dlogp=size)) for name in BOTH]
    found = comparison(*edges, judged=list(BOTH))
    return found.model_copy(update={"quantised": {"rollout": ["fp8-block"]}} | more)


def test_between_the_sides_only_limits_for_the_format_judge() -> None:
    verdict = judge(quantised(0.05), contract(USUAL, FP8))
    assert [(b.limit, b.edge) for b in verdict.breaches] == [("l0", "decode_vs_prefill")]
    checked = {(c.limit, c.edge) for c in verdict.checks if c.metric == "mean_abs_dlogp"}
    assert checked == {("l0", "decode_vs_prefill"), ("l1", "prefill_vs_train")}


@pytest.mark.parametrize("size", [0.2, math.nan])
def test_a_limit_for_the_format_is_broken(size: float) -> None:
    verdict = judge(quantised(size), contract(USUAL, FP8))
    assert ("l1", "prefill_vs_train") in [(b.limit, b.edge) for b in verdict.breaches]
    assert verdict.status == "fail"


def test_without_quantised_weights_its_limits_do_not_apply() -> None:
    verdict = judge(quantised(0.05, quantised={}), contract(USUAL, FP8))
    assert {b.limit for b in verdict.breaches} == {"l0"}
    assert {b.edge for b in verdict.breaches} == set(BOTH)
    assert all(c.limit != "l1" for c in verdict.checks)


def test_an_edge_that_nothing_judges_is_a_doubt() -> None:
    verdict = judge(quantised(0.005), contract(USUAL))
    assert verdict.status == "inconclusive"
    (doubt,) = verdict.doubts
    assert "applies no limit to prefill_vs_train" in doubt


def test_the_figure_is_noted() -> None:
    notes = judge(quantised(0.005), contract(USUAL, FP8)).notes
    (note,) = (n for n in notes if "quantisation" in n)
    assert note.startswith(
        "prefill_vs_train: the sides differ by quantisation (fp8-block), which l1 judges: mean |Δ| "
        "0.005, "
    )


def test_a_limit_for_a_format_is_one_of_an_edge() -> None:
    for wrong in ({"metric": "rows_differ"}, {"quantisation": "int8"}):
        with pytest.raises(ValidationError):
            contract(FP8 | wrong)


def test_a_limit_that_is_moved_to_a_format_is_looser() -> None:
    (change,) = changes(contract(FP8 | {"quantisation": None}), contract(FP8))
    assert (change.kind, change.what) == ("loosened", "quantisation")


def test_a_projection_with_other_weights_may_differ_where_its_inputs_are_equal() -> None:
    """Also where its values were not kept, so that float64 could not judge it."""
    limits = {"metric": "op_error", "atol": 0.1, "rtol": 0.0, "fail": 1.0}
    for name, judged in (("layers.0.v_proj", False), ("layers.0.act", True), ("logits", True)):
        off = site(name, differ=9, introduced=9, frontier=[(1.0, 0.2)], max_abs=0.2)
        edges = [edge(which, sites=[off]) for which in BOTH]
        found = comparison(*edges, judged=list(BOTH))
        broken = {b.edge for b in judge(found, contract(USUAL, limits)).breaches}
        assert broken == set(BOTH)
        quantised = found.model_copy(update={"quantised": {"rollout": ["fp8-block"]}})
        broken = {b.edge for b in judge(quantised, contract(USUAL, FP8, limits)).breaches}
        assert broken == (set(BOTH) if judged else {"decode_vs_prefill"})


def test_a_grid_of_activations_is_one_within_a_side_too() -> None:
    """The passes of a side with the same weights have inputs that differ a little."""
    for formats, judged in ((["fp8-tensor"], True), (["fp8-activations", "fp8-tensor"], False)):
        found = quantised(0.05, quantised={"rollout": formats})
        broken = {(b.limit, b.edge) for b in judge(found, contract(USUAL)).breaches}
        assert broken == ({("l0", "decode_vs_prefill")} if judged else set())
    limit = FP8 | {"quantisation": "fp8-activations", "fail": 0.01}
    broken = {b.edge for b in judge(found, contract(USUAL, limit)).breaches}
    assert broken == set(BOTH)


def test_a_quantised_cache_changes_attention_alone() -> None:
    limits = {"metric": "op_error", "atol": 0.1, "rtol": 0.0, "fail": 1.0}
    for name, judged in (("layers.0.v_proj", True), ("layers.0.attn", False)):
        off = site(name, differ=9, introduced=9, frontier=[(1.0, 0.2)], max_abs=0.2)
        edges = [edge(which, sites=[off]) for which in BOTH]
        found = comparison(*edges, judged=list(BOTH))
        found = found.model_copy(update={"quantised": {"rollout": ["fp8-cache"]}})
        broken = {b.edge for b in judge(found, contract(USUAL, limits)).breaches}
        assert broken == (set(BOTH) if judged else set())
