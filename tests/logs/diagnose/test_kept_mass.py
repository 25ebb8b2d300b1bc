"""A dump that records the kept mass: a truncation on one side is told from another temperature."""

import tomllib
from collections.abc import Callable

import pytest
from simulate_dumps import Dump, temperature_of, truncated

from rlk_align.data import data_path
from rlk_align.logs.diagnose.contract import RunContract, load_run_contract
from rlk_align.logs.diagnose.explain import Explanation, explain
from rlk_align.logs.dumps.record import Sampling
from rlk_align.logs.dumps.sequences import Sequences
from rlk_align.report.explained import explained_document, rollout_distribution

CONTRACT = load_run_contract("run")
TOKENS = 20_000


def explained(
    plant: Callable[[Dump, float], None], bound: float, seed: int = 3,
    contract: RunContract = CONTRACT,
) -> Explanation:  # fmt: skip
    dump = Dump(seed, TOKENS)
    plant(dump, bound)
    dump.records_mass = True
    return explain([dump.sequences_of()], contract)


@pytest.mark.parametrize(("raw", "side"), [("train_raw", "rollout"), ("rollout_raw", "trainer")])
@pytest.mark.parametrize("law", ["top_p", "min_p"])
def test_the_side_that_is_renormalised_is_named(raw: str, side: str, law: str) -> None:
    found = explained(truncated(law, raw), 0.9 if law == "top_p" else 0.05)
    (first, *others) = found.diagnoses
    assert first.name == "truncation"
    assert f"the {side}'s log-probs are among the tokens that" in first.why
    assert "temperature" not in {d.name for d in others}
    # The mass of the record is that which was kept.
    assert 0.8 < float(first.why.split("dropped, ")[1].split(" ")[0]) < 1.0


@pytest.mark.parametrize("raw", ["train_raw", "rollout_raw"])
def test_a_mass_of_one_leaves_a_temperature(raw: str) -> None:
    found = explained(temperature_of(raw), 0.7)
    assert [d.name for d in found.diagnoses] == ["temperature"]


@pytest.mark.parametrize("heat", [0.7, 1.2])
def test_another_temperature_of_equally_truncated_sides_is_a_temperature(heat: float) -> None:
    """The rollout draws at `heat`; the trainer, whose logits are larger by it, is at 1."""

    def heated(dump: Dump, bound: float) -> None:
        dump.top_p, dump.temperature, noise = bound, heat, dump.noise
        dump.noise = lambda: noise() + dump.logits * (heat - 1)  # type: ignore[method-assign]

    assert [d.name for d in explained(heated, 0.95).diagnoses] == ["temperature"]


def test_a_mass_near_one_is_judged_by_a_limit_of_its_own() -> None:
    """A contract of an earlier version has the limit of signs alone, and misses this dump."""
    written = (data_path("contracts") / "run.toml").read_text(encoding="utf-8")
    fields = tomllib.loads(written)
    fields["limits"] = [x for x in fields["limits"] if x.get("statistic") != "kept-mass"]
    earlier, plant = RunContract.model_validate(fields), truncated("min_p", "train_raw")
    (found,) = explained(plant, 0.02).diagnoses
    assert (found.name, found.limit) == ("truncation", CONTRACT.limit("truncation", "kept-mass"))
    assert "truncation" not in {d.name for d in explained(plant, 0.02, contract=earlier).diagnoses}


def test_equal_truncation_on_both_sides_is_ordinary() -> None:
    def both(dump: Dump, bound: float) -> None:
        dump.top_p, dump.temperature = bound, 0.7

    assert [d.name for d in explained(both, 0.9).diagnoses] == ["numerics"]


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({}, "of a distribution that the dump does not state"),
        (
            {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "logprobs_mode": "processed_logprobs"},
            "those at temperature 0.7 among the tokens that top-p 0.9 keeps, by the dump, as the "
            "tokens were drawn",
        ),
        (
            {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "logprobs_mode": "raw_logprobs"},
            "those at temperature 1 among all tokens, by the dump; the tokens were drawn at "
            "temperature 1 among all tokens",
        ),
        (
            {"top_k": 40, "min_p": 0.1, "logprobs_mode": "raw_logprobs"},
            "those at temperature 1 among all tokens, by the dump; the tokens were drawn at an "
            "unstated temperature among the tokens that top-k 40, min-p 0.1 keep",
        ),
    ],
)
def test_the_report_says_which_distribution_the_rollouts_log_probs_are_of(
    stated: dict, words: str
) -> None:
    assert rollout_distribution(Sampling(**stated)) == words


def test_sequences_that_state_several_settings_are_said_to() -> None:
    def mixed(dump: Dump, heat: float) -> None:
        def say(run: Sequences) -> None:
            run.sampling[0] = Sampling(temperature=heat)

        dump.after.append(say)

    found = explained(mixed, 0.7)
    assert found.sampling is None
    facts = {fact.label: fact.text for fact in explained_document(found, "run").facts}
    assert facts["log-probs"].startswith("the rollout's are of distributions that differ")
