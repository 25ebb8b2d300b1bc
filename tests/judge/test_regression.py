"""One run against an earlier one."""

import pytest
from comparisons import comparison, contract, edge, metrics, site

from rlk_align.errors import BadOption
from rlk_align.judge.contract import Contract
from rlk_align.judge.regression import RegressionCheck, judge_regression
from rlk_align.results import Comparison

GROWTH = {"metric": "mean_abs_dlogp", "factor": 1.5, "plus": 1e-3}
WORSE = {"id": "r", "why": "w", "source": "s"} | GROWTH
OTHER_WEIGHTS = {"kind": "weights", "name": "embed", "rollout": "a", "train": "b"}


def held(**changes: object):
    return contract(regressions=[WORSE | changes])


def regressions(before: Comparison, after: Comparison, limits: Contract) -> list[RegressionCheck]:
    verdict = judge_regression(before, after, limits)
    assert not verdict.doubts
    return verdict.checks


def run(**changes: float):
    return comparison(edge(metrics=metrics(**changes)))


@pytest.mark.parametrize(
    ("before", "after", "holds"),
    [
        (0.01, 0.016, True),
        (0.01, 0.0161, False),
        (0.0, 0.001, True),
        (0.0, 0.0011, False),
        (0.01, float("nan"), False),
        (float("nan"), 0.01, False),
    ],
)
def test_a_figure_may_grow_by_so_much(before: float, after: float, holds: bool) -> None:
    (check,) = regressions(run(mean_abs_dlogp=before), run(mean_abs_dlogp=after), held())
    assert check.holds is holds
    assert (check.edge, check.site) == ("prefill_vs_train", None)


def test_an_operator_that_was_equal_stays_equal() -> None:
    bits = held(metric="rows_differ", factor=1.0, plus=0.0)
    before = comparison(edge(sites=[site(differ=50), site("layers.1.act")]))
    same = comparison(edge(sites=[site(differ=50), site("layers.1.act")]))
    assert all(c.holds for c in regressions(before, same, bits))
    after = comparison(edge(sites=[site(differ=10), site("layers.1.act", differ=1)]))
    assert [c.site for c in regressions(before, after, bits) if not c.holds] == ["layers.1.act"]
    # Twice the tokens, the same share.
    longer = comparison(edge(sites=[site(differ=100, rows=200), site("layers.1.act", rows=200)]))
    assert all(c.holds for c in regressions(before, longer, bits))


def test_bits_of_log_probs_are_compared_as_shares() -> None:
    bits = held(metric="bit_mismatches", factor=1.0, plus=0.0)
    before, after = (
        run(max_abs_dlogp=0.1, bit_mismatches=10, tokens=tokens) for tokens in (100, 50)
    )
    (check,) = regressions(before, after, bits)
    assert (check.before, check.after, check.holds) == (0.1, 0.2, False)


def test_runs_that_cannot_be_compared() -> None:
    fine = run(mean_abs_dlogp=0.01)
    with pytest.raises(BadOption, match="no regression limits"):
        regressions(fine, fine, contract())
    others = {
        "different dtype": comparison(edge(), dtype="float16"),
        "different judged edges": comparison(edge("decode_vs_train")),
        "layers.0.act on prefill_vs_train and 1 more in the first": comparison(
            edge(sites=[site("layers.7.act"), site("logprob", op_class="logprob")])
        ),
    }
    for said, other in others.items():
        with pytest.raises(BadOption, match=said):
            regressions(fine, other, held())


@pytest.mark.parametrize(
    ("doubtful", "said"),
    [
        ({"controls": None}, "observer"),
        ({"edges": [], "missing_edges": {"prefill_vs_train": "the engine died"}}, "was not"),
        ({"mismatches": [OTHER_WEIGHTS], "edges": [], "controls": None}, "weights differ"),
    ],
)
@pytest.mark.parametrize("at", ["first", "second"])
def test_of_an_inconclusive_run_nothing_is_concluded(doubtful, said: str, at: str) -> None:
    fine = run(mean_abs_dlogp=0.01)
    other = comparison(**doubtful)
    runs = (other, fine) if at == "first" else (fine, other)
    verdict = judge_regression(*runs, held())
    assert (verdict.status, verdict.exit_code, verdict.checks) == ("inconclusive", 4, [])
    assert all(doubt.startswith(f"the {at} run: ") for doubt in verdict.doubts)
    assert any(said in doubt for doubt in verdict.doubts)
