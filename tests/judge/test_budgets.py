"""Operators held against their budgets: what breaks one, whose fault it is, and how it is told."""

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from comparisons import comparison, edge, metrics, site
from rich.console import Console

from rlk_align.errors import ContractError
from rlk_align.judge.contract import STATISTICS, Contract
from rlk_align.judge.load import load_contract
from rlk_align.judge.verdict import Verdict, cause_of, judge, over_budget, parity
from rlk_align.judge.wording import how_off, why_legitimate
from rlk_align.model.operators import OPERATORS
from rlk_align.report.document_terminal import show_document
from rlk_align.report.verdict import verdict_document
from rlk_align.report.verdict_json import verdict_json
from rlk_align.results import EdgeResult, ErrorPattern, Introducer, RefereedUnit, RoundingErrors

BF16 = load_contract("bf16", "bfloat16")
STRICT = load_contract("bf16-strict", "bfloat16")
NAME = "layers.0.act"


def looks(place: str = "everywhere", manner: str = "scattered", **more: Any) -> ErrorPattern:
    return ErrorPattern.model_validate(
        {"place": place, "at": 0, "manner": manner, "amount": 0.0} | more
    )


def errors(**changes: Any) -> RoundingErrors:
    usual: dict[str, Any] = dict.fromkeys(STATISTICS, 0.0)
    usual |= {"unit": 0.00225, "rms": 1.0, "feature_rms": 1.0, "row_rms": 1.0, "peak": 1.7}
    usual |= {"head": 0, "feature": 0, "row": (3, 4), "pattern": looks()}
    return RoundingErrors(**usual | changes)


def unit(side: str = "train", name: str = NAME, reason: str = "", **changes: Any) -> RefereedUnit:
    named = ("passname", "edges", "explanation", "op_class", "dtype", "other_weight")
    more = {k: changes.pop(k) for k in named if k in changes}
    fields: dict[str, Any] = {
        "side": side,
        "passname": "prefill",
        "edges": ["prefill_vs_train"],
        "site": name,
        "layer": 0,
        "op": name.rpartition(".")[2],
        "op_class": "elementwise",
        "rows": 0 if reason else 10,
        "errors": None if reason else errors(**changes),
        "reason": reason,
    }
    return RefereedUnit(**fields | more)


def differing(name: str = NAME, **changes: Any) -> Any:
    fields = dict.fromkeys(("introduced", "introduced_valued", "differ", "valued_rows"), 1)
    return site(name, **fields | {"first_introduced": (0, 1)} | changes)


def judged(*units: RefereedUnit, of: EdgeResult | None = None, by: Contract = BF16) -> Verdict:
    return judge(comparison(of or edge(sites=[differing()]), referee=list(units)), by)


def found(verdict: Verdict) -> list[tuple[str, str | None]]:
    return [(o.unit.site, o.side) for o in over_budget(verdict, verdict.comparison.edges[0])]


def test_a_healthy_operator_holds() -> None:
    verdict = judged(unit("rollout"), unit("train"))
    assert (verdict.status, verdict.breaches, found(verdict)) == ("pass", [], [])
    assert len([c for c in verdict.checks if c.side]) == 2
    assert not [n for n in verdict.notes if "float64" in n]


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.parametrize("side", ["rollout", "train"])
def test_each_statistic_has_its_bound(name: str, side: str) -> None:
    bound = getattr(BF16.budget("act"), name)
    assert judged(unit(side, **{name: bound})).status == "pass"
    for bad in (math.nextafter(bound, 99), math.inf, math.nan):
        verdict = judged(
            unit(side, **{name: bad}), unit("train" if side == "rollout" else "rollout")
        )
        assert verdict.status == "fail"
        (breach,) = verdict.breaches
        assert (breach.metric, breach.side, breach.site) == (f"rounding_{name}", side, NAME)
        assert found(verdict) == [(NAME, side)]
        words = how_off(over_budget(verdict, verdict.comparison.edges[0])[0].units[0], BF16)
        assert f"{bound:g} allowed" in words
        json.dumps(verdict_json(verdict), allow_nan=False)


def test_a_negative_gain_is_as_bad() -> None:
    for name in ("gain", "head_gain", "feature_gain", "feature_shift"):
        assert judged(unit(**{name: -9.0})).status == "fail"


def test_the_worst_statistic_is_reported() -> None:
    (breach,) = judged(unit(rms=3.0, gain=40.0, peak=10.0)).breaches
    assert (breach.metric, breach.value) == ("rounding_gain", 40.0)
    (breach,) = judged(unit(rms=300.0, gain=math.nan)).breaches
    assert breach.metric == "rounding_gain"


HIDDEN = "rollout prefill cannot show it: it is computed in one kernel"


def alone(*units: RefereedUnit, by: Contract = BF16) -> Verdict:
    """`act` is shown by one side alone, and what is computed before and behind it by both."""
    around = [site("layers.0.up_proj"), differing("layers.0.down_proj")]
    of = edge(sites=around, unpaired=[(NAME, HIDDEN, True)])
    shown = [unit(name="layers.0.up_proj"), *units, unit(name="layers.0.down_proj")]
    return judged(*shown, of=of, by=by)


def test_what_one_side_alone_shows_is_judged() -> None:
    hidden = unit("rollout", reason=HIDDEN)
    healthy = alone(hidden, unit("train"))
    assert (healthy.status, found(healthy)) == ("pass", [])
    assert [c.site for c in healthy.checks if c.side] == [NAME, "layers.0.down_proj"]
    verdict = alone(hidden, unit("train", rms=9.0))
    assert verdict.status == "fail"
    assert found(verdict) == [(NAME, "train")]
    (over,) = over_budget(verdict, verdict.comparison.edges[0])
    assert (over.unit.last_equal, over.unchecked) == ("layers.0.up_proj", [hidden])
    assert verdict_json(verdict)["divergence"]["first_over_budget"]["site"] == NAME
    said = [line.strip() for line in lines(verdict)]
    assert f"{NAME}  the training side is off" in said
    assert f"rollout was not checked here: {HIDDEN}" in said


def test_what_one_side_alone_shows_is_named_in_execution_order() -> None:
    bad = unit(name="layers.0.down_proj", op_class="matmul", rms=9.0)
    of = edge(sites=[differing("layers.0.down_proj")], unpaired=[(NAME, HIDDEN, True)])
    verdict = judged(unit("train", rms=9.0), bad, of=of)
    assert found(verdict) == [(NAME, "train"), ("layers.0.down_proj", "train")]


def test_equal_outputs_are_not_judged() -> None:
    verdict = judged(unit(rms=99.0), of=edge())
    assert (verdict.status, found(verdict)) == ("pass", [])


def test_a_pass_of_another_edge_is_not_judged_here() -> None:
    other = unit("rollout", passname="decode", edges=["decode_vs_train"], rms=99.0)
    assert judged(other, unit("train")).status == "pass"


def test_sides() -> None:
    bad = {"rms": 9.0}
    assert found(judged(unit("rollout", **bad), unit("train", **bad))) == [(NAME, "both")]
    assert found(judged(unit("rollout", **bad), unit("train"))) == [(NAME, "rollout")]
    assert found(judged(unit("rollout", reason="gone"), unit("train", **bad))) == [(NAME, "train")]
    decode = {"edges": ["decode_vs_prefill"], **bad}
    two = (unit("rollout", passname="decode", **decode), unit("rollout", **decode))
    verdict = judged(*two, of=edge("decode_vs_prefill", sites=[differing()]))
    assert found(verdict) == [(NAME, "rollout")]
    how = verdict_json(verdict)["divergence"]["first_over_budget"]["how"]
    assert how["rollout"].count("errors of 9 roundings") == 2
    assert "prefill: " in how["rollout"]


def test_a_side_that_is_no_end_of_the_edge_is_not_missed_there() -> None:
    of = {"edges": ["decode_vs_prefill"]}
    bad = unit("rollout", passname="decode", rms=9.0, **of)
    elsewhere = unit("train", reason="a patch changed it", other_weight=True)
    decode = edge("decode_vs_prefill", sites=[differing()])
    verdict = judged(bad, unit("rollout", **of), elsewhere, of=decode)
    assert found(verdict) == [(NAME, "rollout")]
    assert "train was not checked here" not in " ".join(lines(verdict))


def test_a_factor_near_1_keeps_its_digits() -> None:
    def said(amount: float) -> str:
        scaled = ErrorPattern(place="everywhere", at=0, manner="scaled", amount=amount)
        return how_off(unit(rms=9.0, pattern=scaled), BF16)

    assert said(2.3e-4).startswith("scaled by 1 + 0.00023; ")
    assert said(-7.1e-6).startswith("scaled by 1 - 7.1e-06; ")
    assert said(-0.0688).startswith("scaled by 0.9312; ")


def too_far() -> EdgeResult:
    return edge(sites=[differing(frontier=[(1.0, 0.5)])])


def test_within_rounding_and_too_far_apart() -> None:
    """By a contract whose tolerances hold beside its budgets; the built-in one asks for them only
    where a side was not recomputed."""
    both = (unit("rollout"), unit("train"))
    assert found(judged(*both, of=too_far(), by=STRICT)) == [(NAME, "neither")]
    assert found(judged(*both, of=too_far())) == []
    for known in ([], [unit("rollout"), unit("train", reason="gone")]):
        assert found(judged(*known, of=too_far())) == [(NAME, None)]
    without = BF16.model_copy(update={"budgets": []})
    both = (unit("rollout"), unit("train"))
    assert found(judged(*both, of=too_far(), by=without)) == [(NAME, None)]
    decode = edge("decode_vs_prefill", sites=[differing(frontier=[(1.0, 0.5)])])
    of = {"edges": ["decode_vs_prefill"]}
    known = [
        unit("rollout", passname="decode", **of),
        unit("rollout", reason="gone", **of),
    ]
    assert found(judged(*known, of=decode)) == [(NAME, None)]


def test_a_side_of_another_dtype_is_held_to_the_budgets_of_that_dtype() -> None:
    """Between the two contracts' bounds: off for the one, healthy for the other."""
    fp32 = load_contract("fp32", "float32").budget("attn_norm")
    bf16 = BF16.budget("attn_norm")
    assert fp32 is not None
    assert bf16 is not None
    assert bf16.row_gain < 1.4 < fp32.row_gain
    name = "layers.0.attn_norm"
    of = edge(sites=[differing(name)])
    between = unit("train", name, row_gain=1.4, dtype="float32")
    assert found(judged(unit("rollout", name), between, of=of)) == []
    # The same in the contract's own dtype, or of a run that does not say, is off.
    for dtype in ("bfloat16", ""):
        narrow = unit("train", name, row_gain=1.4, dtype=dtype)
        assert found(judged(unit("rollout", name), narrow, of=of)) == [(name, "train")]
    beyond = unit("train", name, row_gain=1.1 * fp32.row_gain, dtype="float32")
    assert found(judged(unit("rollout", name), beyond, of=of)) == [(name, "train")]
    none = BF16.model_copy(update={"budgets": []})
    assert found(judged(unit("rollout", name), beyond, of=of, by=none)) == []


def test_nobody_is_called_off_where_the_other_side_has_another_weight() -> None:
    bad = unit("rollout", rms=9.0)
    gone = unit("train", reason="a patch changed it", other_weight=True)
    verdict = judged(bad, gone)
    assert found(verdict) == [(NAME, None)]
    shown = " ".join(lines(verdict))
    assert "it is unknown which side is off" in shown
    assert "train was not checked here: a patch changed it" in shown
    assert f"give train the checkpoint's own {NAME}" in shown
    # Not recorded is another thing: what is off is off.
    verdict = judged(bad, unit("train", reason="it was not recorded"))
    assert found(verdict) == [(NAME, "rollout")]
    assert "train was not checked here: it was not recorded" in " ".join(lines(verdict))


def test_one_sentence_says_where_the_sides_part() -> None:
    early, late = "layers.0.act", "layers.1.act"
    first = Introducer(site=early, layer=0, op="act", sample=0, position=1, last_equal=None)
    of = edge(sites=[differing(early), differing(late)], first_bitwise=first)
    both = [unit("rollout", early), unit("train", early), unit("rollout", late)]
    shown = lines(judged(*both, unit("train", late, rms=9.0), of=of))
    told = f"The sides differ earlier, first at {early}, by legitimate rounding."
    assert told in " ".join(" ".join(shown).split())
    of = edge(sites=[site(early, differ=1), differing(late)])
    shown = lines(judged(unit("train", late, rms=9.0), of=of))
    assert "none of them in a row whose inputs are bit-equal" in " ".join(shown)
    assert not [text for text in shown if text.startswith("first divergence")]


def test_the_next_step_is_no_dead_end() -> None:
    first = Introducer(
        site="logprob", layer=None, op="logprob", sample=0, position=1, last_equal=None
    )
    metrics_over = edge(
        sites=[differing(), differing("logprob", op="logprob", op_class="logprob", layer=None)],
        first_bitwise=first,
        metrics=metrics(max_abs_dlogp=9.0),
    )
    shown = " ".join(lines(judged(of=metrics_over)))
    assert "compare how both sides compute them" in shown
    other = first.model_copy(update={"site": NAME, "op": "act", "layer": 0})
    shown = lines(judged(of=metrics_over.model_copy(update={"first_bitwise": other})))
    assert any("rlk-align probe runs/1 --attribute" in text for text in shown)
    assert sum("rlk-align probe" in text for text in shown) == 1


def test_a_worst_row_is_shown_where_none_introduced_a_difference() -> None:
    inherited = edge(sites=[site(NAME, differ=1)])
    verdict = judged(unit(rms=9.0), of=inherited)
    (over,) = over_budget(verdict, inherited)
    assert (over.unit.sample, over.unit.position) == (3, 4)


def test_over_budget_in_the_record() -> None:
    of = edge(sites=[differing("layers.0.act"), differing("layers.1.act")])
    verdict = judged(
        unit("train", "layers.1.act", rms=12.3, pattern=looks(manner="scaled", amount=0.02)),
        unit(
            "rollout",
            "layers.0.act",
            rms=5.0,
            pattern=looks("feature", "shifted", at=11, amount=-1),
        ),
        of=of,
    )
    record = json.loads(json.dumps(verdict_json(verdict), allow_nan=False))["divergence"]
    assert [o["site"] for o in record["over_budget"]] == ["layers.0.act", "layers.1.act"]
    assert record["first_over_budget"] == record["over_budget"][0]
    assert record["first_over_budget"]["side"] == "rollout"
    assert [o["how"] for o in record["over_budget"]] == [
        {"rollout": "feature 11 only: shifted by -1; errors of 5 roundings, 2.8 allowed"},
        {"train": "scaled by 1.02; errors of 12.3 roundings, 2.8 allowed"},
    ]
    assert record["over_budget"][1].keys() >= {"site", "layer", "op", "sample", "position"}
    assert {b["side"] for b in verdict_json(verdict)["breaches"]} == {"rollout", "train"}


WORDS = {
    "row": "one row only",
    "token": "at token id 7 only",
    "position": "at position 7 only",
    "feature": "feature 7 only",
    "channel": "channel 7 of every head",
    "head": "head 7 only",
}


@pytest.mark.parametrize("place", WORDS)
def test_places_and_manners_in_words(place: str) -> None:
    def words(manner: str, amount: float = 0.0) -> str:
        pattern = looks(place, manner, at=7, amount=amount)
        return how_off(unit(rms=9.0, row_gain=50.0, pattern=pattern), BF16)

    figure = "; errors of 9 roundings, 2.8 allowed"
    assert words("scattered") == WORDS[place] + figure
    assert words("scaled", -0.5) == f"{WORDS[place]}: scaled by 0.5{figure}"
    assert words("shifted", 0.25) == f"{WORDS[place]}: shifted by +0.25{figure}"
    assert words("rows scaled", 0.02) == f"{WORDS[place]}: rows scaled by ±2.00%{figure}"


def test_other_words() -> None:
    assert how_off(unit(), BF16) == ""
    assert how_off(unit(reason="gone"), BF16) == ""
    assert how_off(unit(rms=9.0), BF16.model_copy(update={"budgets": []})) == ""
    assert how_off(unit(rms=9.0), BF16) == "errors of 9 roundings, 2.8 allowed"
    assert (
        how_off(unit(peak=math.inf), BF16) == "one entry with an error of inf roundings, 9 allowed"
    )
    low = how_off(unit(row_gain=1.9), BF16)
    assert low.startswith("rows scaled by ±0.43%")
    assert "as by statistics in low precision" in low
    assert "it is so" in how_off(unit(rms=9.0, explanation="it is so"), BF16)


def test_what_was_not_recomputed_is_told() -> None:
    assert (
        "1 of 2 operators were not checked against float64, from train prefill layers.0.act on: "
        "gone" in judged(unit("rollout"), unit(reason="gone")).notes
    )
    assert "no operator was checked against float64" in judged().notes


def lines(verdict: Verdict) -> list[str]:
    out = io.StringIO()
    show_document(
        verdict_document(verdict, Path("runs/1")), Console(file=out, width=100, soft_wrap=True)
    )
    return out.getvalue().splitlines()


def test_lines_fit() -> None:
    """With long names and the longest words."""
    name, more = "layers.101.attn_residual", {"layer": 101}
    pattern = looks("channel", "rows scaled", at=127, amount=0.0123)
    bad = {"rms": 123456.7, "row_gain": 1.0, "gain": 23456.7, "pattern": pattern}
    of = edge(sites=[differing(name, first_introduced=(1023, 131071), **more), differing()])
    verdict = judged(
        unit("rollout", name, **bad), unit("train", name, **bad), unit(row_gain=1.9), of=of
    )
    shown = lines(verdict)
    assert [text for text in shown if len(text) > 100] == []
    text = "\n".join(shown)
    assert "both sides are off" in text
    assert "as by statistics in low precision" in text
    assert text.count("errors of 1.23e+05 roundings, 1.4 allowed") == 3
    assert "at sample 1023, position 131071" in text
    apart = "\n".join(lines(judged(unit("rollout"), unit(), of=too_far(), by=STRICT)))
    assert "both sides are within their rounding, but too far from each other" in apart


def test_no_operator_beyond_its_budget_is_said() -> None:
    text = "\n".join(lines(judged(unit("rollout"), unit())))
    assert "no operator beyond its budget on either side: 2 of 2 recomputed in float64" in text


def contract(tmp_path: Path, budgets: str) -> Contract:
    text = (Path(__file__).parents[2] / "contracts" / "bf16.toml").read_text()
    path = tmp_path / "c.toml"
    head = text.split("[[budgets]]")[0].replace('id = "bf16"', 'id = "mine"')
    path.write_text(head + budgets)
    return load_contract(str(path), "bfloat16")


def budget(ops: str | None, name: str = "b", **changes: Any) -> str:
    values = {"ops": ops} | dict.fromkeys(STATISTICS, 1.0) | changes
    figures = "\n".join(f"{k} = {v}" for k, v in values.items() if v is not None)
    return f'[[budgets]]\nid = "{name}"\nwhy = "w"\nsource = "s"\n{figures}\n'


EVERY = json.dumps([op for b in BF16.budgets for op in b.ops])


def test_budgets_of_ones_own(tmp_path: Path) -> None:
    mine = contract(tmp_path, budget(EVERY))
    assert {mine.budget(op).rms for op in json.loads(EVERY)} == {1.0}
    assert contract(tmp_path, "").budgets == []


@pytest.mark.parametrize(
    ("budgets", "said"),
    [
        (budget(EVERY, op_classes='["matmuls"]'), "op_classes"),
        (budget(EVERY, op_classes="[]"), "op_classes"),
        (budget(EVERY, op_classes='["matmul", "matmul"]'), "matmul has two budgets"),
        (budget(None), "give it ops or op_classes"),
        (budget(EVERY) + budget('["act"]', "c"), "act has two budgets"),
        (budget(EVERY.replace('"attn"', '"attn", "attn"')), "attn has two budgets"),
        (budget(EVERY, rms=-1.0), "rms"),
        (budget(EVERY, rms="nan"), "rms"),
        (budget(EVERY, rms="inf"), "rms"),
        (budget(EVERY, rms='"1"'), "rms"),
        (budget(EVERY, rms=None), "rms"),
        (budget(EVERY, sum=1.0), "sum"),
        (budget(EVERY.replace('"attn"', '"attention"')), "ops.18"),
        (budget("[]"), "ops"),
        (budget(EVERY, "noise"), "not unique"),
    ],
)
def test_budgets_that_say_nothing_clear(tmp_path: Path, budgets: str, said: str) -> None:
    with pytest.raises(ContractError, match=r"c\.toml") as error:
        contract(tmp_path, budgets)
    assert said in error.value.message


CLASSES = json.dumps(["elementwise", "reduction", "matmul", "attention", "logprob"])


def test_a_budget_holds_for_a_class_but_for_those_that_another_names(tmp_path: Path) -> None:
    whole = contract(tmp_path, budget(None, op_classes=CLASSES) + budget('["act"]', "c", rms=9.0))
    assert whole.budget("act", "elementwise").id == "c"
    assert {
        whole.budget(op, kind).id for op, kind in (("q_rope", "elementwise"), ("o", "matmul"))
    } == {"b"}
    # The order in the file says nothing.
    turned = contract(tmp_path, budget('["act"]', "c") + budget(None, op_classes=CLASSES))
    assert (turned.budget("act", "elementwise").id, turned.budget("o", "matmul").id) == ("c", "b")


def test_a_new_operator_is_held_to_the_budget_of_its_class(tmp_path: Path) -> None:
    """By the widest that names operators of the class, where none is of the class itself."""
    for op_class, name in (
        ("elementwise", "rounding-rope"),
        ("reduction", "rounding-norms"),
        ("matmul", "rounding-products"),
        ("attention", "rounding-attention"),
    ):
        assert BF16.budget("new", op_class).id == name
    assert BF16.budget("new", "convolution") is None
    mine = contract(
        tmp_path, budget(EVERY) + budget(None, "c", op_classes='["reduction"]', rms=0.5)
    )
    assert (mine.budget("new", "reduction").id, mine.budget("q_norm", "reduction").id) == ("c", "b")
    new = {"name": "layers.0.new", "op_class": "reduction"}
    for rms, breaches in ((0.4, []), (0.6, [("c", "layers.0.new")])):
        held = unit(**new, rms=rms, feature_rms=0.0, row_rms=0.0, peak=0.0)
        one = edge(sites=[differing("layers.0.new", op_class="reduction")])
        verdict = judge(comparison(one, referee=[held]), mine)
        assert [(b.limit, b.site) for b in verdict.breaches] == breaches


def test_a_model_with_an_operator_of_no_budget_is_not_judged(tmp_path: Path) -> None:
    few = contract(tmp_path, budget('["act"]'))
    judge(comparison(edge(sites=[site("layers.0.q_rope")])), few)
    with pytest.raises(ContractError, match=r"has no limit for layers\.0\.q_norm") as error:
        judge(comparison(edge(sites=[site("layers.0.q_norm", op_class="reduction")])), few)
    assert error.value.fix == "add a budget of the class reduction"


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
def test_built_in_contracts_bound_every_operator(name: str) -> None:
    built_in = load_contract(name, {"bf16": "bfloat16", "fp16": "float16"}.get(name, "float32"))
    assert all(built_in.budget(op, OPERATORS[op].op_class) for op in json.loads(EVERY))


def test_a_difference_that_rounded_weights_make_is_legitimate() -> None:
    site = "embed"
    exact = {**dict.fromkeys(STATISTICS, 0.0), "op_class": "embedding"}
    of = edge(sites=[differing(site)])
    units = [unit(side, site, **exact) for side in ("rollout", "train")]
    made = comparison(of, referee=units, casts={"rollout": "bfloat16"})
    verdict = judge(made, BF16)
    assert why_legitimate(verdict, of, site) == (
        "legitimate: weights are cast to bfloat16 on the rollout side"
    )
    assert parity(made.model_copy(update={"casts": {}}), "weights") == "equal"


def test_a_difference_that_quantised_weights_make_is_no_rounding() -> None:
    for name, said in (("layers.0.q_proj", "quantisation"), ("layers.0.q_norm", "legitimate")):
        of = edge(sites=[differing(name)])
        units = [unit(side, name, rms=1.0) for side in ("rollout", "train")]
        made = comparison(of, referee=units)
        quantised = made.model_copy(update={"quantised": {"train": "fp8-block"}})
        why = why_legitimate(judge(made, BF16), of, name)
        assert why.startswith(
            "legitimate rounding: compared with float64, rollout and train have errors of 1 and 1 "
            "roundings, where "
        )
        assert why_legitimate(judge(quantised, BF16), of, name).startswith(said)


def excess(both: float, train: float = 0.0, **more: Any) -> Verdict:
    """Both sides exceed a budget of 2.8 roundings, by as much or otherwise."""
    sides = [unit("rollout", rms=both), unit("train", rms=train or both)]
    return judged(*sides, **more)


def test_both_sides_alike_and_by_little_are_a_doubt_and_no_breach() -> None:
    verdict = excess(4.0)
    assert (verdict.status, verdict.breaches, found(verdict)) == ("inconclusive", [], [])
    (doubt,) = verdict.doubts
    assert doubt.startswith(f"{NAME}: both sides exceed the budget alike, rms 4 to 4 roundings")
    assert cause_of(verdict) is None


@pytest.mark.parametrize(
    ("both", "train", "sides"),
    [(5.7, 0.0, "both"), (4.0, 1.0, "rollout"), (2.9, 5.0, "both"), (float("nan"), 0.0, "both")],
)
def test_more_than_that_blames(both: float, train: float, sides: str) -> None:
    """By twice the budget, on one side alone, on one side much more, or without a number."""
    verdict = excess(both, train)
    assert verdict.status == "fail"
    assert found(verdict) == [(NAME, sides)]
    assert cause_of(verdict) == "operator"


def test_a_fault_elsewhere_is_named_beside_an_excess_of_both_sides() -> None:
    other = "layers.0.down_proj"
    sides = [unit("rollout", rms=4.0), unit("train", rms=4.0)]
    more = [
        unit("train", other, op_class="matmul", rms=50.0),
        unit("rollout", other, op_class="matmul"),
    ]
    verdict = judged(*sides, *more, of=edge(sites=[differing(), differing(other)]))
    assert (verdict.status, found(verdict)) == ("fail", [(other, "train")])
    assert verdict.doubts == []


def test_an_older_contract_blames_both_sides() -> None:
    assert found(excess(4.0, by=STRICT)) == [(NAME, "both")]


def test_drift_is_no_bug() -> None:
    healthy = [unit("rollout"), unit("train")]
    far = metrics(tokens=2000, mean_abs_dlogp=0.2, max_abs_dlogp=1.0, bit_mismatches=2000)
    drift = judged(*healthy, of=edge(metrics=far, sites=[differing()]))
    assert (drift.status, cause_of(drift)) == ("fail", "drift")
    assert "no operator is at fault" in lines(drift)[0]
    passes = judged(*healthy)
    assert (passes.status, cause_of(passes)) == ("pass", "none")
    assert lines(passes)[0] == " PASS  Healthy."


def test_narrow_rows_may_be_scaled_by_more() -> None:
    """What the errors of few features leave by chance is common to rows that are alike."""
    bound = BF16.budget("v_proj").row_gain

    def holds(features: int, gain: float) -> bool:
        of = edge(sites=[differing("layers.0.v_proj")])
        bad = unit("train", "layers.0.v_proj", row_gain=gain, features=features)
        return judged(unit("rollout", "layers.0.v_proj"), bad, of=of).status == "pass"

    assert holds(96, 0.99 * bound)
    assert not holds(96, 1.01 * bound)
    assert not holds(4096, 1.01 * bound)
    assert holds(16, bound + 0.14)
    assert not holds(16, bound + 0.16)


def test_a_row_of_few_features_may_be_further_off() -> None:
    """And one of many less: as the largest of their rms is by chance."""
    bound = BF16.budget("act").row_rms

    def holds(features: int, share: float) -> bool:
        of = {"row_rms": share * bound, "features": features}
        return judged(unit("rollout"), unit(**of)).status == "pass"

    assert holds(96, 0.99)
    assert not holds(96, 1.01)
    assert holds(16, 1.4)
    assert not holds(4096, 0.8)
    assert holds(1, 0.99)
    assert not holds(1, 1.01)
