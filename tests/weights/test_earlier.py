"""The step that a checkpoint's path says."""

import pytest

from rlk_align.weights.earlier import step_of


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/runs/checkpoint-300", "step 300"),
        ("/runs/global_step_300/actor", "step 300"),
        ("/runs/global_step300/actor/huggingface", "step 300"),
        ("/runs/iter_0000300", "step 300"),
        ("/runs/step7", "step 7"),
        ("/runs/300", "step 300"),
        ("/runs/trained_2", "step 2"),
        # Numbers that are no steps.
        ("/home/user42/models/model", "model"),
        ("/data/2024/model", "model"),
        ("/scratch/run-3/model", "model"),
        ("/models/qwen3", "qwen3"),
    ],
)
def test_a_number_is_a_step_where_its_name_says_so(path: str, name: str) -> None:
    assert step_of(path) == name
