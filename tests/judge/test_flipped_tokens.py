"""Limits on log-probs and a sparse model's flipped tokens: these stand apart only where the choice
of experts is known to be sound."""

from typing import Any

import pytest
from comparisons import ROOM, comparison, contract, edge, metrics, site

from rlk_align.judge.load import load_contract
from rlk_align.judge.verdict import Verdict, judge
from rlk_align.results import (
    EdgeRouting,
    ErrorPattern,
    LayerRouting,
    RefereedUnit,
    RoundingErrors,
)

FAR, NEAR = 2.5, 0.05
TOKENS, FLIPPED = 2000, 36


def checked(**changes: Any) -> RefereedUnit:
    """The choice of one side, held against its own logits."""
    zero = dict.fromkeys(
        ("rms", "gain", "row_gain", "head_gain", "feature_rms", "feature_gain", "feature_shift"),
        0.0,
    )
    errors = RoundingErrors(
        unit=1.0,
        **zero,
        head=0,
        feature=0,
        row_rms=0.0,
        row=(0, 0),
        peak=0.0,
        pattern=ErrorPattern(place="everywhere", at=0, manner="scattered", amount=0.0),
    )
    fields = {"side": "train", "passname": "prefill", "edges": ["prefill_vs_train"], "layer": 1}
    fields |= {"site": "layers.1.experts", "op": "experts", "op_class": "routing"}
    return RefereedUnit(**fields | {"rows": 9, "errors": errors} | changes)


NOT_KEPT = {"rows": 0, "errors": None, "reason": "no values were kept"}


def verdict(
    judged: Any, unflipped: float = NEAR, tokens: int = TOKENS - FLIPPED, **changes: Any
) -> Verdict:
    layer = LayerRouting(
        site="layers.1.experts",
        layer=1,
        rows=TOKENS,
        flipped=FLIPPED,
        at_router=0,
        measured=0,
        ties=0,
        largest_gap=0.0,
        first_at_router=None,
    )
    routing = EdgeRouting(
        layers=[layer],
        tokens=TOKENS,
        flipped_tokens=FLIPPED,
        sampled=TOKENS,
        flipped_sampled=TOKENS - tokens,
        share_of_dlogp=0.4,
        mean_abs_dlogp_flipped=0.07,
        mean_abs_dlogp_other=0.002,
        unflipped=metrics(tokens=tokens, max_abs_dlogp=unflipped),
    )
    whole = metrics(tokens=TOKENS, max_abs_dlogp=FAR, bit_mismatches=TOKENS)
    sites = [site("layers.1.experts", op_class="routing", layer=1)]
    one = edge(metrics=whole, routing=routing, sites=sites)
    return judge(comparison(one, **{"referee": [checked()]} | changes), judged)


def test_a_flipped_token_may_be_far_off() -> None:
    found = verdict(load_contract("bf16", "bfloat16"))
    assert [b.metric for b in found.breaches] == []
    (limit,) = [c for c in found.checks if c.limit == "noise-excess"]
    assert limit.value == NEAR / ROOM / 0.01
    (note,) = [n for n in found.notes if "same experts" in n]
    assert "1,964 tokens" in note
    assert "the 36 others count apart" in note


@pytest.mark.parametrize(
    "changes",
    [
        {"unflipped": FAR},
        {"unflipped": float("nan")},
        {"referee": []},
        {"referee": [checked(**NOT_KEPT)]},
        {"referee": [checked(), checked(side="rollout", **NOT_KEPT)]},
        {"referee": [checked(edges=["decode_vs_train"])]},
        {"tokens": 31},
    ],
    ids=str,
)
def test_it_may_not_where_that_is_not_known(changes: dict[str, Any]) -> None:
    found = verdict(load_contract("bf16", "bfloat16"), **changes)
    assert "excess" in [b.metric for b in found.breaches]


def test_nor_by_a_contract_that_has_no_budget_for_the_choice() -> None:
    for judged in (load_contract("bitwise", "bfloat16"), contract()):
        found = verdict(judged)
        (breach,) = found.breaches
        assert breach.value == {"max_abs_dlogp": FAR, "bit_mismatches": TOKENS}[breach.metric]
        assert not [n for n in found.notes if "same experts" in n]
