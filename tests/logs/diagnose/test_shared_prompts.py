"""Samples of one prompt, which share tokens, log-probs and cached tokens."""

import numpy as np
from simulate_dumps import GROUP, Dump

from rlk_align.logs.diagnose.contract import load_run_contract
from rlk_align.logs.diagnose.evidence import Evidence
from rlk_align.logs.diagnose.explain import explain
from rlk_align.logs.diagnose.sample import gather


def test_cached_tokens_that_the_first_sample_of_a_group_left_are_fresh() -> None:
    dump = Dump(1, 40_000)
    stale = (dump.steps > 0) & (dump.groups % 3 == 0)
    first = np.arange(dump.sequences) % GROUP == 0
    dump.cached = np.where(first & ~stale, 0, 32)
    dump.extra *= np.where(stale[dump.sequence], 2.5, 1.0)
    found = explain([dump.sequences_of()], load_run_contract())
    assert found.diagnoses[0].name == "stale-cache"
    assert 2 < found.diagnoses[0].value < 3


def test_healthy_cached_tokens_are_no_fault() -> None:
    dump = Dump(2, 40_000)
    dump.cached = np.where(np.arange(dump.sequences) % GROUP == 0, 0, 32)
    assert explain([dump.sequences_of()], load_run_contract()).status == "pass"


def test_a_token_that_samples_share_is_no_filler() -> None:
    run = Dump(3, 4_000).sequences_of()
    places = run.offsets[:GROUP] + run.prompt_lengths[:GROUP]
    run.rollout[places], run.train[places] = -1.25, -4.5
    sample = gather([run], load_run_contract())
    assert sample.kept is not None
    assert not Evidence(sample.kept, sample.counts, load_run_contract()).filled.any()
    run.rollout[places] = -np.linspace(1.25, 2.25, GROUP)
    assert Evidence(run, sample.counts, load_run_contract()).filled.sum() == GROUP


def test_a_long_tail_of_a_negligible_error_is_no_flipped_route() -> None:
    dump = Dump(4, 40_000)
    dump.extra *= 0.05
    dump.extra[dump.rng.random(len(dump.extra)) < 0.05] *= 20
    assert explain([dump.sequences_of()], load_run_contract()).status == "pass"
