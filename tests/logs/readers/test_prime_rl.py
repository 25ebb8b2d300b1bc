"""prime-rl's token exports, as `token_export.py` writes them."""

import math
from pathlib import Path

import pytest
from dump_files import drawn, lines

from rlk_align.errors import DumpError

G, T, H = drawn(0, 4), drawn(1, 4), [-x for x in drawn(2, 4)]
FILLER = math.log(1 / 151936)


def sequence(index: int = 0, step: int = 3, **changed: object) -> dict:
    """A prompt of 2 and a response of 2."""
    fields = {
        "schema_version": 1,
        "step": step,
        "export_step": step,
        "rank": 0,
        "micro_step": 1,
        "micro_sequence_idx": index,
        "export_sequence_idx": index,
        "run_id": None,
        "env_name": "math",
        "token_ids": [5, 6, 7, 8],
        "position_ids": [0, 1, 2, 3],
        "loss_mask": [False, False, True, True],
        "advantages": [0.5] * 4,
        "rewards": [1.0] * 4,
        "inference_logprobs": [0.0, 0.0, G[2], G[3]],
        # Position 0 of a micro-batch is log(1/V); of a later sequence in the pack it is junk.
        "trainer_logprobs": [FILLER if index == 0 else -17.0, *T[1:]],
        "entropy": H,
        "mismatch_kl": [None, None, 0.1, 0.1],
        "is_masked": [False] * 4,
    }
    return fields | changed


def export(*records: dict, step: int = 3, rank: int = 0, stable: bool = True) -> Path:
    folder = Path(f"token_exports/step_{step}")
    lines(folder / f"rank_{rank}.jsonl", list(records))
    if stable:
        (folder / "STABLE").touch()
    return folder


@pytest.mark.parametrize("format", ["prime-rl", "auto"])
@pytest.mark.parametrize("path", [".", "token_exports", "token_exports/step_3"])
def test_every_field(imported, format: str, path: str) -> None:
    export(sequence(), sequence(1))
    manifest, read = imported(format, path)
    assert (manifest.format, manifest.version) == ("prime-rl", "schema 1")
    assert list(read.ids) == ["3:1:0:rank_0", "3:1:1:rank_0"]
    assert read.steps.tolist() == [3, 3]
    assert read.prompt_lengths.tolist() == [2, 2]
    assert read.token_ids.tolist() == [5, 6, 7, 8] * 2
    assert read.position_ids.tolist() == [0, 1, 2, 3] * 2
    assert read.pack_indices.tolist() == [0, 1]
    assert read.scored.tolist() == [False, False, True, True] * 2
    assert read.rollout[2:4].tolist() == G[2:]
    assert read.rollout_missing.tolist() == [True, True, False, False] * 2
    assert read.train[1:4].tolist() == T[1:]
    assert read.train_missing.tolist() == [True, False, False, False] * 2
    assert read.entropy[:4].tolist() == H
    assert read.rewards.tolist() == [1.0, 1.0]


def test_a_step_without_stable_is_refused(imported) -> None:
    export(sequence(), stable=False)
    with pytest.raises(DumpError, match="STABLE"):
        imported("prime-rl", "token_exports/step_3")


def test_of_several_steps_the_stable_are_read_in_order(imported) -> None:
    for step in (10, 9, 11):
        for rank in (0, 1):
            export(sequence(step=step), step=step, rank=rank, stable=step != 11)
    manifest, read = imported("prime-rl", "token_exports")
    assert read.steps.tolist() == [9, 9, 10, 10]
    (skipped,) = manifest.skipped
    assert "step_11" in skipped
    assert "STABLE" in skipped


def test_null_stands_for_what_was_not_finite_and_is_told(imported) -> None:
    export(sequence(inference_logprobs=[0.0, 0.0, None, G[3]]))
    manifest, read = imported("prime-rl", ".")
    assert read.rollout_missing.tolist() == [True, True, True, False]
    assert manifest.rollout_missing == 1
    assert any("NaN" in note for note in manifest.notes)


@pytest.mark.parametrize(
    "channels",
    [
        {"rl_weights": [0.0, 0.0, 0.0, 1.0], "ce_weights": [0.0, 0.0, 1.0, 0.0]},
        {"losses": [{}, {}, {"ce": {"mask": True}}, {"rl": {"advantage": 1.0, "mask": True}}]},
    ],
)
def test_tokens_of_cross_entropy_alone_are_not_scored(imported, channels: dict) -> None:
    export(sequence(**channels))
    _, read = imported("prime-rl", ".")
    assert read.scored.tolist() == [False, False, False, True]


@pytest.mark.parametrize(
    ("weights", "scored"),
    [
        ({"rl_weights": [None] * 4, "ce_weights": [None] * 4, "ref_kl_weights": [None] * 4}, 2),
        ({"rl_weights": [0.0] * 4, "ref_kl_weights": [0.0, 0.0, 0.0, 1.0]}, 1),
        ({"ref_kl_weights": [0.0] * 4}, 2),
    ],
)
def test_a_weight_that_is_null_is_the_default(imported, weights: dict, scored: int) -> None:
    export(sequence(**weights))
    _, read = imported("prime-rl", ".")
    assert read.scored.sum() == scored


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema_version": 2}, "schema_version is not 1"),
        ({"trainer_logprobs": [-1.0] * 3}, "trainer_logprobs has 3 entries"),
        ({"position_ids": [0, 1]}, "position_ids has 2 entries"),
        ({"loss_mask": [1]}, "loss_mask has 1 entries"),
        ({"loss_mask": [None] * 4}, "loss_mask has null"),
        ({"inference_logprobs": None}, "inference_logprobs"),
        ({"step": "3"}, "step is a text"),
        ({"rewards": ["a"] * 4}, "rewards"),
        ({"losses": [1, 2, 3, 4]}, "losses"),
    ],
)
def test_a_wrong_value_is_named(imported, change: dict, said: str) -> None:
    export(sequence(), sequence(1, **change))
    with pytest.raises(DumpError, match=f"line 2: {said}"):
        imported("prime-rl", ".")
