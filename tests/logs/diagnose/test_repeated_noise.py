"""Noise that differs from sample to sample, and noise that depends only on the tokens."""

import numpy as np
import pytest
from explained import explained
from simulate_dumps import GROUP, PROMPT, Dump

from rlk_align.logs.diagnose.explain import Explanation
from rlk_align.logs.diagnose.repeats import shared_prefixes

LENGTH = 60


def grouped(seed: int, groups: int, repeated: bool, factor: float) -> Explanation:
    """Samples of a group have one prompt, and the same laws at the same places; so has the noise
    that is `repeated`. The error is that of rounding, `factor` times as large."""
    dump = Dump(seed, groups * GROUP * LENGTH)
    dump.groups = np.arange(groups).repeat(GROUP)
    dump.sequences, dump.lengths = groups * GROUP, np.full(groups * GROUP, LENGTH)
    dump.steps = np.zeros(dump.sequences, dtype=np.int64)
    dump.sequence = np.arange(dump.sequences).repeat(LENGTH)
    dump.position = np.tile(np.arange(LENGTH), dump.sequences)
    cell = dump.groups[dump.sequence] * LENGTH + dump.position
    of_cell = 3 * dump.rng.standard_normal((groups * LENGTH, 16))
    dump.logits, dump.scale = of_cell[cell], np.full(len(cell), 0.04)
    dump.start_healthy("bfloat16", 1)
    noise = dump.rng.standard_normal(dump.logits.shape) * 0.04 * factor
    if repeated:
        noise = noise[np.unique(cell, return_index=True)[1]][cell]
    dump.noise = lambda: noise  # type: ignore[method-assign]
    run = dump.sequences_of()
    for k in range(len(run)):
        first = run.offsets[k // GROUP * GROUP]
        own = slice(run.offsets[k], run.offsets[k] + PROMPT)
        run.token_ids[own] = run.token_ids[first : first + PROMPT]
    return explained(run)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("repeated", "name"), [(True, "quantisation"), (False, "dropout")])
def test_what_the_trainer_does_not_repeat_is_no_rounding(
    repeated: bool, name: str, seed: int
) -> None:
    found = grouped(seed, 64, repeated, 5.0).diagnoses[0]
    assert found.name == name
    assert ("does not repeat itself" in found.why) != repeated


@pytest.mark.parametrize("repeated", [True, False])
def test_healthy_noise_is_asked_nothing(repeated: bool) -> None:
    assert grouped(0, 64, repeated, 1.0).exit_code == 0


def test_prefixes_are_shared_as_far_as_the_tokens_are_equal() -> None:
    run = Dump(0, 2_000).sequences_of().take(np.arange(3))
    for k, ids in enumerate(([5, 6, 7, 8], [5, 6, 9, 8], [4, 6, 7, 8])):
        start = run.offsets[k]
        run.token_ids[start : start + PROMPT] = 3
        run.token_ids[start + PROMPT : start + PROMPT + 4] = ids
    found = shared_prefixes(run)
    assert (found >= 0).sum() == 4
    first, second = (run.offsets[k] + PROMPT for k in (0, 1))
    assert found[first] == found[second] != found[first + 1] == found[second + 1]
