"""Warnings, tails, waivers and where a limit holds: each rule fires, and only where it should."""

from datetime import date

import pytest
from comparisons import comparison, contract, edge, metrics, site
from pydantic import ValidationError

from rlk_align.errors import ContractError
from rlk_align.judge.contract import Contract, Limit, Tail
from rlk_align.judge.load import load_contract
from rlk_align.judge.verdict import judge
from rlk_align.report.verdict_json import verdict_json
from rlk_align.results import Mismatch

DAY = date(2026, 5, 1)


def of(**changes: float):
    return comparison(edge(metrics=metrics(**changes)))


def test_a_warning_is_told_and_passes() -> None:
    limit = {"metric": "max_abs_dlogp", "warn": 0.05, "fail": 0.1}
    near = judge(of(max_abs_dlogp=0.07), contract(limit))
    assert (near.status, near.exit_code) == ("pass", 0)
    assert [(w.value, w.warn) for w in near.warnings] == [(0.07, 0.05)]
    assert verdict_json(near)["warnings"][0]["metric"] == "max_abs_dlogp"
    assert judge(of(max_abs_dlogp=0.05), contract(limit)).warnings == []
    over = judge(of(max_abs_dlogp=0.11), contract(limit))
    assert (over.exit_code, over.warnings, len(over.breaches)) == (1, [], 1)


def test_a_limit_that_fails_before_it_warns_is_none() -> None:
    with pytest.raises(ValidationError, match="`fail` is below its `warn`"):
        contract({"metric": "k3", "warn": 0.2, "fail": 0.1})


TAIL = {"quantile": 0.99, "value": 0.03, "scale": 0.01, "chance": 1e-3}


def test_a_tail_grows_with_the_tokens_up_to_the_bound() -> None:
    tail = Tail(**TAIL)
    # 0.03 + 0.01 ln(N · 0.01 / 0.001)
    assert tail.bound(100) == pytest.approx(0.03 + 0.01 * 6.907755)
    assert tail.bound(10_000) == pytest.approx(0.03 + 0.01 * 11.512925)
    assert tail.bound(0) == tail.bound(1) > 0.03
    limit = {"metric": "max_abs_dlogp", "fail": 0.12, "tail": TAIL}
    for tokens, largest, code in (
        (100, 0.098, 0),
        (100, 0.1, 1),
        (1000, 0.1, 0),
        (10**9, 0.121, 1),
    ):
        shown = of(max_abs_dlogp=largest, tokens=tokens)
        assert judge(shown, contract(limit)).exit_code == code, (tokens, largest)
    with pytest.raises(ValidationError, match="only a maximum has a tail"):
        contract({"metric": "k3", "fail": 0.1, "tail": TAIL})


def test_a_tail_is_broken_by_a_thousandth_of_healthy_runs_at_most() -> None:
    """Drawn as it says: exponential above its quantile."""
    import numpy as np

    tail, draw, tokens = Tail(**TAIL), np.random.default_rng(5), 500
    above = draw.random((20_000, tokens)) < 0.01
    largest = np.where(above, 0.03 + draw.exponential(0.01, (20_000, tokens)), 0).max(axis=1)
    assert (largest > tail.bound(tokens)).mean() < 2e-3


def test_a_quantile_is_not_held_against_few_tokens() -> None:
    limit = {"metric": "p99_abs_dlogp", "fail": 0.01, "min_tokens": 100}
    other = {"metric": "k3", "fail": 1}
    few, many = (of(max_abs_dlogp=0.05, p99_abs_dlogp=0.05, tokens=n) for n in (99, 100))
    assert judge(few, contract(limit, other)).exit_code == 0
    assert judge(many, contract(limit, other)).exit_code == 1


def test_a_limit_holds_for_its_dtypes() -> None:
    tight = {"metric": "max_abs_dlogp", "fail": 0.01, "dtypes": ["float32"]}
    wide = {"metric": "max_abs_dlogp", "fail": 0.1, "dtypes": ["bfloat16"]}
    both = contract(tight, wide, dtypes=["float32", "bfloat16"])
    shown = metrics(max_abs_dlogp=0.05)
    assert judge(comparison(edge(metrics=shown)), both).exit_code == 0
    assert judge(comparison(edge(metrics=shown), dtype="float32"), both).exit_code == 1
    with pytest.raises(ValidationError, match="no entry for bfloat16"):
        contract(tight, dtypes=["float32", "bfloat16"])
    with pytest.raises(ValidationError, match="not a dtype of the contract"):
        contract(tight, wide)


OPERATORS = {"metric": "op_error", "atol": 0.1, "rtol": 0.1, "fail": 1}


def test_sites_are_matched_by_pattern_and_a_pattern_of_none_is_an_error() -> None:
    wrong = site(introduced=1, differ=1, valued_rows=1, frontier=[(1.0, 0.5)])
    shown = comparison(edge(sites=[wrong]))
    tight = OPERATORS | {"sites": ["layers.*.act"]}
    loose = OPERATORS | {"fail": 9}
    assert [b.limit for b in judge(shown, contract(tight, loose)).breaches] == ["l0"]
    with pytest.raises(ContractError, match=r"layers\.\*\.nothing"):
        judge(shown, contract(OPERATORS | {"sites": ["layers.*.nothing"]}, loose))
    # A site that this run does not show is still one.
    unshown = edge(sites=[wrong], unpaired=[("layers.9.act", "not captured", True)])
    judge(comparison(unshown), contract(OPERATORS | {"sites": ["layers.9.act"]}, loose))


def test_an_operator_that_no_limit_speaks_of_is_an_error() -> None:
    some = contract(OPERATORS | {"op_classes": ["elementwise", "matmul", "attention"]})
    norm = comparison(edge(sites=[site("layers.0.q_norm", op_class="reduction")]))
    with pytest.raises(ContractError, match=r"has no limit for layers\.0\.q_norm") as error:
        judge(norm, some)
    assert error.value.fix == "add a limit of op_error that covers the class reduction"
    judge(comparison(edge(sites=[site("layers.0.act"), site("logprob", op_class="logprob")])), some)
    unknown = comparison(edge(sites=[site("layers.0.new", op_class="new")]))
    with pytest.raises(ContractError, match=r"has no limit for layers\.0\.new"):
        judge(
            unknown,
            contract(
                OPERATORS | {"op_classes": ["elementwise", "reduction"]},
                OPERATORS | {"op_classes": ["matmul", "attention"]},
            ),
        )


def waiver(**changes: object) -> dict:
    fields = {
        "limit": "l0",
        "owner": "ada",
        "reason": "fixed in 1.2",
        "expires": date(2026, 5, 31),
    }
    return fields | changes


def waived(*waivers: dict, largest: float = 0.2):
    limit = {"metric": "max_abs_dlogp", "fail": 0.1}
    return judge(of(max_abs_dlogp=largest), contract(limit, waivers=list(waivers)), DAY)


def test_a_waiver_excuses_a_breach_until_its_day() -> None:
    verdict = waived(waiver())
    assert (verdict.status, verdict.exit_code, verdict.breaches) == ("pass", 0, [])
    (check,) = verdict.waived
    assert check.waiver is not None
    assert check.waiver.owner == "ada"
    (use,) = verdict.waivers
    assert (use.state, use.days_left, use.breaches) == ("used", 30, 1)
    record = verdict_json(verdict)
    assert record["waivers"][0] | {"expires": None} == {
        "limit": "l0",
        "sites": None,
        "edges": None,
        "owner": "ada",
        "reason": "fixed in 1.2",
        "expires": None,
        "state": "used",
        "days_left": 30,
        "breaches": 1,
    }
    assert record["waived"][0]["metric"] == "max_abs_dlogp"
    assert waived(waiver(expires=DAY)).exit_code == 0


def test_an_expired_waiver_fails_even_where_nothing_is_wrong() -> None:
    late = waiver(expires=date(2026, 4, 30))
    broken = waived(late)
    assert (broken.exit_code, len(broken.breaches)) == (1, 1)
    idle = waived(late, largest=0.01)
    assert (idle.status, idle.exit_code, idle.breaches) == ("fail", 1, [])
    assert [use.days_left for use in idle.expired] == [-1]


def test_an_unused_waiver_is_told_and_passes() -> None:
    verdict = waived(waiver(), largest=0.01)
    assert verdict.exit_code == 0
    assert [use.state for use in verdict.waivers] == ["unused"]


def test_a_waiver_covers_what_it_names_and_no_nan() -> None:
    assert waived(waiver(edges=["decode_vs_train"])).exit_code == 1
    with pytest.raises(ValidationError, match="which is not a limit"):
        waived(waiver(limit="l7"))
    wrong = site(differ=1, rows=4)
    bits = {"metric": "rows_differ", "fail": 0}
    shown = comparison(edge(sites=[wrong, site("layers.1.act", differ=2)]))
    for pattern, left in (("layers.0.*", ["layers.1.act"]), ("layers.?.act", [])):
        held = contract(bits, waivers=[waiver(sites=[pattern])])
        assert [b.site for b in judge(shown, held, DAY).breaches] == left
    infinite = comparison(edge(sites=[site(nonfinite=1)]))
    excused = contract(waivers=[waiver(limit="finite")])
    assert judge(infinite, excused, DAY).exit_code == 1


def test_long_responses_are_told_where_limits_were_chosen_for_shorter_ones() -> None:
    chosen = contract(sequences={"tokens": 64, "ess": 0.5})
    assert judge(comparison(longest_response=64), chosen).notes == []
    (note,) = judge(comparison(longest_response=65), chosen).notes
    assert "65 tokens" in note


@pytest.mark.parametrize(
    "wrong",
    [
        {"warn": -1.0},
        {"warn": float("nan")},
        {"tail": TAIL | {"scale": 0.0}},
        {"tail": TAIL | {"chance": 1.0}},
        {"sites": []},
        {"sites": ["layers.0.act"]},
        {"min_tokens": -1},
        {"dtypes": []},
    ],
)
def test_a_limit_that_means_nothing_is_refused(wrong: dict) -> None:
    fields = {"id": "x", "metric": "max_abs_dlogp", "fail": 0.1, "why": "w", "source": "s"}
    Limit.model_validate(fields)
    with pytest.raises(ValidationError):
        Limit.model_validate(fields | wrong)


def test_the_schema_names_every_key() -> None:
    schema = Contract.model_json_schema()
    assert {"limits", "budgets", "waivers", "extends", "regressions"} <= schema["properties"].keys()
    assert schema["additionalProperties"] is False


def test_tolerances_of_operators_hold_where_no_budget_does() -> None:
    """Where the sides were allowed to differ, each may be what its own checkpoint says, and still
    be far from the other."""
    bf16 = load_contract("bf16", "bfloat16")
    far = edge(sites=[site(differ=1, introduced=1, introduced_valued=1, valued_rows=1,
                           first_introduced=(0, 1), frontier=[(1.0, 0.5)])])  # fmt: skip
    allowed = {
        "mismatches": [Mismatch(kind="attributes", name="rope_theta", rollout=1e4, train=2e4)],
        "allowed": ["attributes"],
    }
    assert judge(comparison(far), bf16).status == "fail"
    assert judge(comparison(far, **allowed), bf16).status == "fail"


@pytest.mark.parametrize(("sequences", "status"), [(50, "fail"), (1, "pass")])
def test_a_mean_ratio_without_an_interval_is_no_breach(sequences: int, status: str) -> None:
    nan = float("nan")
    shifted = metrics(mean_abs_dlogp=0.01, max_abs_dlogp=0.05, ratio_mean=1.01)
    known = {} if sequences > 1 else {"ratio_low": nan, "ratio_high": nan}
    law = shifted.noise.model_copy(update={"sequences": sequences, **known})
    of = edge(metrics=shifted.model_copy(update={"noise": law}))
    assert judge(comparison(of), load_contract("bf16", "bfloat16")).status == status
