"""Samples that are copies of one another, and samples that are equal by chance."""

import dataclasses

import numpy as np
import pytest
from explained import CONTRACT, explained
from simulate_dumps import GROUP, PROMPT, Dump, healthy

from rlk_align.logs.diagnose.contract import RunContract
from rlk_align.logs.diagnose.explain import explain
from rlk_align.logs.diagnose.repeats import repeats
from rlk_align.logs.dumps.record import Sampling
from rlk_align.logs.dumps.sequences import Sequences


def one_prompt_a_group(run: Sequences) -> Sequences:
    """Simulated samples of a group have different prompts; here they share the first one."""
    for k in range(len(run)):
        first = run.offsets[k // GROUP * GROUP]
        own = slice(run.offsets[k], run.offsets[k] + PROMPT)
        run.token_ids[own] = run.token_ids[first : first + PROMPT]
    return run


def copied(run: Sequences, of: np.ndarray) -> Sequences:
    """Sample k becomes a copy of sample `of[k]`, with other noise in the log-probs."""
    made = run.take(of)
    rng = np.random.default_rng(5)
    made.rollout[:] += 1e-4 * rng.standard_normal(made.tokens) * -np.expm1(made.rollout)
    return dataclasses.replace(made, ids=run.ids)


def alike(run: Sequences, groups: int) -> np.ndarray:
    """In the first groups all samples are copies of the first one."""
    every = np.arange(len(run))
    return np.where(every < groups * GROUP, every // GROUP * GROUP, every)


@pytest.mark.parametrize("groups", [1, 3, 6])
def test_a_sampler_that_is_seeded_alike_is_named(groups: int) -> None:
    run = one_prompt_a_group(healthy(0, 20_000))
    found = explained(copied(run, alike(run, groups)))
    assert found.exit_code == 1
    assert found.diagnoses[0].name == "duplicated"
    assert f"in {groups} of 6 groups most samples repeat one another" in found.diagnoses[0].why
    assert found.diagnoses[0].samples


def test_two_workers_with_one_seed_are_named() -> None:
    run = one_prompt_a_group(healthy(0, 20_000))
    found = explained(copied(run, np.arange(len(run)) // 2 * 2))
    assert found.diagnoses[0].name == "duplicated"


def test_one_copy_that_fills_a_batch_is_no_fault() -> None:
    run = one_prompt_a_group(healthy(0, 20_000))
    of = np.arange(len(run))
    of[-1] = of[-2]
    assert explained(copied(run, of)).exit_code == 0


def test_copies_do_not_narrow_an_interval() -> None:
    run = healthy(0, 20_000)
    whole = explained(run)
    doubled = run.take(np.repeat(np.arange(len(run)), 2))
    again = explained(doubled)
    for name in ("c", "mean_ratio"):
        a, b = getattr(whole, name), getattr(again, name)
        assert b.value == pytest.approx(a.value, rel=1e-12)
        assert b.high - b.low == pytest.approx(a.high - a.low, rel=1e-6)


def sampled(logits: np.ndarray, length: int, seed: int, greedy: bool = False) -> Sequences:
    """24 groups of samples of `length` tokens, each token from one of these distributions."""
    dump = Dump(seed, 30_000)
    dump.groups = np.arange(24).repeat(GROUP)
    dump.sequences = len(dump.groups)
    dump.steps = np.sort(np.arange(24) % 6).repeat(GROUP)
    dump.lengths = np.full(dump.sequences, length)
    dump.sequence = np.arange(dump.sequences).repeat(length)
    dump.position = np.tile(np.arange(length), dump.sequences)
    rng = np.random.default_rng(seed)
    # Samples of a group have the same distributions at the same positions.
    of_group = logits[rng.integers(0, len(logits), (24, length))]
    dump.logits = of_group[dump.groups[dump.sequence], dump.position]
    dump.scale = np.full(len(dump.sequence), 0.04)
    dump.start_healthy("bfloat16", 1)
    if greedy:
        dump.sampled = lambda law: law.argmax(1)  # type: ignore[method-assign]
    return one_prompt_a_group(dump.sequences_of())


def laws(width: float, count: int = 400) -> np.ndarray:
    return width * np.random.default_rng(1).standard_normal((count, 16))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("width", "length"), [(2.0, 1), (3.0, 2), (2.0, 4), (8.0, 12), (30.0, 40)])
def test_short_answers_and_sure_models_repeat_by_chance(
    width: float, length: int, seed: int
) -> None:
    run = sampled(laws(width), length, seed)
    found = repeats(run, CONTRACT)
    assert found.groups == 24
    assert len(found.repeated) == 0


@pytest.mark.parametrize("said", [0.0, None])
def test_greedy_decoding_repeats_and_is_no_fault(said: float | None) -> None:
    run = sampled(laws(3.0), 60, 0, greedy=True)
    run = dataclasses.replace(run, sampling=[Sampling(temperature=said)] * len(run))
    found = explained(run)
    assert "duplicated" not in {d.name for d in found.diagnoses}
    untested = {x.name: x.why for x in found.untested}
    if said is None:
        assert "greedy" in untested["duplicated"]
    else:
        assert "duplicated" not in untested


def test_a_sampler_at_a_lower_temperature_than_recorded_is_no_copier() -> None:
    """Log-probs at temperature 1 of answers that were sampled at 0.6."""
    run = sampled(laws(3.0) / 0.6, 3, 2)
    run.rollout[:] = run.rollout * 0.6
    assert not len(repeats(run, CONTRACT).repeated)


def test_ids_that_are_not_known_repeat_nothing() -> None:
    run = healthy(0, 20_000)
    run.token_ids[:] = -1
    assert explained(run).exit_code == 0


def test_a_contract_of_an_earlier_version_does_not_ask() -> None:
    kept = [x for x in CONTRACT.limits if x.diagnosis != "duplicated"]
    earlier = RunContract.model_validate(CONTRACT.model_dump() | {"limits": kept})
    run = one_prompt_a_group(healthy(0, 20_000))
    found = explain([copied(run, alike(run, 6))], earlier)
    assert "duplicated" not in {d.name for d in found.diagnoses}
