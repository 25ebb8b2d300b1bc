"""The words for values in place of log-probs: the value, its side, and its tokens."""

import warnings

import numpy as np
import pytest
from explained import explained
from simulate_dumps import healthy

from rlk_align.logs.dumps.sequences import Sequences

END = 7


def with_ends(seed: int = 0) -> tuple[Sequences, np.ndarray]:
    """A healthy run whose responses all end with one token id, and the indices of these tokens."""
    run = healthy(seed, 20_000)
    run.token_ids[run.token_ids == END] = END + 1
    last = run.offsets[1:] - 1
    run.token_ids[last] = END
    return run, last


def test_the_run_with_ends_is_healthy() -> None:
    assert explained(with_ends()[0]).exit_code == 0


def test_a_trainer_that_writes_0_at_each_end_of_sequence_is_no_shifted_mask() -> None:
    run, last = with_ends()
    run.train[last] = 0.0
    found = explained(run).diagnoses[0]
    assert found.name == "missing"
    assert "0 from the trainer at" in found.why
    assert f"each of them is token {END}" in found.why
    assert "the last scored one of its turn" in found.why


@pytest.mark.parametrize("value", [0.0, -9999.0, None])
def test_a_rollout_without_the_log_prob_of_its_last_token_is_named(value: float | None) -> None:
    run, last = with_ends()
    run.rollout[last] = np.nan if value is None else value
    run.rollout_missing[last] = value is None
    found = explained(run).diagnoses[0]
    assert found.name == "missing"
    assert f"each of them is token {END}" in found.why


def test_null_at_one_token_fails() -> None:
    run = healthy(0, 20_000)
    place = int(np.flatnonzero(run.compared)[99])
    run.rollout[place], run.rollout_missing[place] = np.nan, True
    found = explained(run)
    assert found.exit_code == 1
    assert found.diagnoses[0].name == "missing"
    assert "1 of 18,750" not in found.diagnoses[0].why
    assert "scored tokens has no log-prob" in found.diagnoses[0].why


@pytest.mark.parametrize(
    ("value", "word"), [(np.nan, "NaN"), (np.inf, "infinite"), (-np.inf, "infinite")]
)
def test_what_is_not_finite_is_named_by_its_word(value: float, word: str) -> None:
    run = healthy(0, 20_000)
    run.train[np.flatnonzero(run.compared)[[7, 77, 777]]] = value
    found = explained(run).diagnoses[0]
    assert found.name == "missing"
    assert f"{word} from the trainer at 3 tokens" in found.why


@pytest.mark.parametrize("side", ["rollout", "train", "both"])
@pytest.mark.parametrize(
    ("change", "said"), [(np.negative, "−log p"), (np.exp, "look like probabilities")]
)
def test_values_above_0_have_a_name_of_their_own(change, said: str, side: str) -> None:
    run = healthy(0, 20_000)
    for name in ("rollout", "train") if side == "both" else (side,):
        getattr(run, name)[:] = change(getattr(run, name))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = explained(run)
    assert [d.name for d in found.diagnoses] == ["above-zero"]
    assert found.exit_code == 1
    assert said in found.diagnoses[0].why


def test_one_value_above_0_fails() -> None:
    run = healthy(0, 20_000)
    run.train[np.flatnonzero(run.compared)[5]] = 0.2
    found = explained(run)
    assert [d.name for d in found.diagnoses] == ["above-zero"]
    assert found.exit_code == 1


def test_a_sentinel_is_named_with_its_count() -> None:
    run = healthy(0, 20_000)
    run.rollout[np.flatnonzero(run.compared)[:40]] = -9999.0
    assert "-9999 from the rollout at 40 tokens" in explained(run).diagnoses[0].why


def test_a_mask_one_token_late_is_shifted_though_it_ends_on_one_id() -> None:
    """The token behind each response is the same one, and the mask leaves out the first sampled
    one."""
    run = healthy(0, 20_000)
    run.token_ids[run.token_ids == END] = END + 1
    first = run.offsets[:-1] + run.prompt_lengths
    run.scored[first] = False
    last = run.offsets[1:] - 1
    run.token_ids[last] = END
    run.rollout[last], run.rollout_missing[last] = np.nan, True
    found = explained(run).diagnoses[0]
    assert found.name == "mask-shifted"
