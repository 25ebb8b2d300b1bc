"""Labels of the weights' versions that do not fit the noise."""

import numpy as np
import pytest
from explained import explained
from simulate_dumps import Dump

from rlk_align.logs.diagnose.explain import Explanation


def labelled(seed: int, older: str | None, size: float = 0.1, label: int = 0) -> Explanation:
    """A run whose labels are `label` versions older than the trainer; half of the tokens are of
    weights from one step before: those of whole sequences, or the first ones of each."""
    dump = Dump(seed, 40_000)
    dump.versions = np.maximum(dump.steps - label, 0)
    draw = dump.rng.random(dump.sequences)
    if older == "sequences":
        dump.margin = np.where((draw < 0.5)[dump.sequence], size, 0.0)
    elif older == "first tokens":
        early = dump.position < (draw * dump.lengths)[dump.sequence]
        dump.margin = np.where(early, size, 0.0)
    return explained(dump.sequences_of())


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize(("older", "size"), [("sequences", 0.15), ("first tokens", 0.1)])
def test_two_versions_that_are_labelled_as_one_are_named(
    older: str, size: float, label: int
) -> None:
    for seed in range(3):
        found = labelled(seed, older, size, label)
        assert found.exit_code == 1
        assert found.diagnoses[0].name == "stale-weights"
        assert "labels of the weights' versions do not fit the noise" in found.diagnoses[0].why


@pytest.mark.parametrize("seed", range(8))
def test_labels_that_fit_are_no_fault(seed: int) -> None:
    found = labelled(seed, None)
    assert found.exit_code == 0
    assert not any("with one label" in x.why for x in found.untested)


def test_labels_that_are_swapped_are_named() -> None:
    dump = Dump(1, 40_000)
    lag = dump.rng.integers(0, 2, dump.sequences)
    dump.versions = np.maximum(dump.steps - lag, 0)
    own = (dump.steps == dump.versions)[dump.sequence]
    dump.margin = np.where(own, 0.1, 0.0)
    found = explained(dump.sequences_of())
    assert found.diagnoses[0].name == "stale-weights"
    assert "labelled" in found.diagnoses[0].statistic


def test_without_labels_none_is_doubted() -> None:
    dump = Dump(1, 40_000)
    draw = dump.rng.random(dump.sequences)
    dump.extra = np.where(dump.position < (draw * dump.lengths)[dump.sequence], 1.8, 1.0)
    assert explained(dump.sequences_of()).exit_code == 0
