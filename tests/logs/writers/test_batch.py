"""Batches as records: the token of each value, the values that are null, and the refusals."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlk_align.errors import DumpError
from rlk_align.logs.dumps.record import Sampling
from rlk_align.logs.writers.batch import batch_records
from rlk_align.logs.writers.step_file import write_step

IDS = [[0, 11, 12, 13, 14, 0], [21, 22, 23, 24, 25, 26]]
"""Prompts of two tokens and responses of at most three; row 0 is padded."""
THERE = [[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]
G = [[-1.0, -0.5, 0.0], [-2.0, 0.0, -3.0]]
T = [[-1.5, -0.25, 0.0], [-2.5, -0.125, -3.5]]


def batch(**changed: Any) -> dict[str, Any]:
    fields = {
        "token_ids": np.array(IDS),
        "attention_mask": np.array(THERE),
        "mask": np.array([[1, 1, 0], [1, 0, 1]]),
        "rollout_logprobs": np.array(G, np.float32),
        "train_logprobs": np.array(T, np.float32),
        "prompt_lengths": [2, 3],
    }
    return fields | changed


def test_padding_is_left_out_and_missing_values_are_null() -> None:
    first, second = batch_records(**batch())
    assert (first["token_ids"], first["prompt_length"]) == ([11, 12, 13, 14], 2)
    assert first["mask"] == [True, True]
    assert (first["rollout_logprobs"], first["train_logprobs"]) == ([-1.0, -0.5], [-1.5, -0.25])
    # The tool's token was not sampled.
    assert second["rollout_logprobs"] == [-2.0, None, -3.0]
    assert second["train_logprobs"] == [-2.5, -0.125, -3.5]
    assert first["group"] != second["group"]


@pytest.mark.parametrize(("sentinel", "written"), [(-9999.0, None), (0.0, 0.0)])
def test_a_value_that_stands_for_none_is_null(sentinel: float, written: float | None) -> None:
    """A 0.0 within the mask may be a log-prob: only the whole run shows it."""
    g = np.array([[-1.0, sentinel, 0.0], G[1]])
    assert batch_records(**batch(rollout_logprobs=g))[0]["rollout_logprobs"] == [-1.0, written]


def test_an_honest_zero_and_a_nan_are_values(tmp_path: Path) -> None:
    g, t = np.array(G), np.array(T)
    g[0, :2], t[0, 0] = (0.0, np.nan), -0.01
    first = batch_records(**batch(rollout_logprobs=g, train_logprobs=t))[0]
    assert first["rollout_logprobs"][0] == 0.0
    assert math.isnan(first["rollout_logprobs"][1])


def test_a_batch_of_which_both_sides_are_sure_is_written() -> None:
    zeros = np.zeros((2, 3))
    made = batch_records(**batch(rollout_logprobs=zeros, train_logprobs=zeros - 1e-7))
    assert made[0]["rollout_logprobs"] == [0.0, 0.0]


def test_next_token_arrays_leave_out_the_first_column() -> None:
    """Column j scores token j + 1: five columns for six tokens."""
    mask = np.array([[0, 0, 1, 1, 0], [0, 0, 1, 0, 1]])
    wide = {k: np.zeros((2, 5)) for k in ("rollout_logprobs", "train_logprobs")}
    for name, values in (("rollout_logprobs", G), ("train_logprobs", T)):
        wide[name][:, 2:] = values
    made = batch_records(**batch(mask=mask, prompt_lengths=None, **wide))
    assert made == batch_records(**batch())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_values_are_exact(imported_step, dtype: torch.dtype) -> None:
    g = -torch.rand(2, 3, generator=torch.Generator().manual_seed(1)).to(dtype) - 0.1
    t = (g * 1.01).requires_grad_()
    read = imported_step(batch_records(**batch(rollout_logprobs=g, train_logprobs=t)))
    assert read.rollout[~read.rollout_missing].tolist() == [*g[0, :2].tolist(), *g[1].tolist()]
    assert read.train[~read.train_missing].tolist() == [*t[0, :2].tolist(), *t[1].tolist()]


def test_every_field(imported_step) -> None:
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=-1, logprobs_mode="raw_logprobs")
    read = imported_step(
        batch_records(
            **batch(),
            entropy=torch.tensor([[0.5, 0.25, 9.0], [1.0, 2.0, 3.0]]),
            groups=["a", "b"],
            rewards=torch.tensor([1.0, 0.5]),
            rollout_version=6,
            train_version=7,
            sampling=sampling,
            rollout_dtype="bfloat16",
            train_dtype="float32",
            mask_rewritten=True,
        )
    )
    assert (list(read.ids), list(read.groups)) == (["7-0-0", "7-0-1"], ["a", "b"])
    assert read.steps.tolist() == read.train_versions.tolist() == [7, 7]
    assert set(read.rollout_versions.tolist()) == {6}
    assert read.prompt_lengths.tolist() == [2, 3]
    assert read.entropy[~np.isnan(read.entropy)].tolist() == [0.5, 0.25, 1.0, 2.0, 3.0]
    assert read.rewards.tolist() == [1.0, 0.5]
    assert list(read.sampling) == [sampling, sampling]
    assert (read.rollout_dtypes[0], read.train_dtypes[0]) == ("bfloat16", "float32")
    assert read.mask_rewritten.all()
    assert read.scored.tolist() == [0, 0, 1, 1, 0, 0, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rollout_logprobs": None}, "rollout_logprobs is None"),
        ({"train_logprobs": None}, "train_logprobs is None"),
        ({"rollout_logprobs": np.zeros((2, 3))}, "rollout_logprobs is 0.0 at every token"),
        ({"train_logprobs": np.zeros((2, 3))}, "train_logprobs is 0.0 at every token"),
        # A mask of tools that is padded with 1 and not multiplied by the completion's mask.
        ({"mask": np.array([[1, 1, 1], [1, 0, 1]])}, "1 tokens of padding in row 0"),
        # A mask that is one token early.
        ({"prompt_lengths": [3, 3]}, "2 precede the first token that the loss counts"),
        ({"prompt_lengths": [1, 3]}, "precede the log-probs"),
        ({"prompt_lengths": [2]}, r"\[1\], and \[2\] is expected"),
        ({"rollout_logprobs": np.array(G)[:, 1:]}, r"\[2, 2\], and \[2, 3\] is expected"),
        ({"train_logprobs": [[-1.0], [-1.0, -2.0]]}, "several lengths"),
        ({"train_logprobs": [[None] * 3] * 2}, "values that are not numbers"),
        ({"token_ids": np.array(IDS) / 2}, "token ids"),
        ({"mask": np.full((2, 3), 0.5)}, "values other than 0 and 1"),
        ({"mask": np.ones((2, 7))}, r"mask is \[2, 7\]"),
        ({"token_ids": np.zeros((0, 6), int)}, "empty"),
        ({"groups": ["a"]}, "groups has 1"),
    ],
)
def test_what_does_not_fit_together_is_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(DumpError, match=said) as raised:
        batch_records(**batch(**changed))
    assert raised.value.fix


def test_a_row_without_a_scored_token_keeps_its_values() -> None:
    made = batch_records(**batch(mask=np.array([[0, 0, 0], [1, 0, 1]])))
    assert made[0]["rollout_logprobs"] == [-1.0, -0.5]


def test_lines_keep_the_published_schema(tmp_path: Path) -> None:
    published = json.loads((Path(__file__).parents[3] / "docs/logprobs.schema.json").read_text())
    path = write_step(tmp_path, 7, batch_records(**batch()))
    for line in path.read_text().splitlines():
        assert json.loads(line).keys() <= published["properties"].keys()
