"""NeMo-RL's dumps, as `log_batched_dict_as_jsonl` writes them."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
from dump_files import drawn, lines

from rlk_align.errors import DumpError

NAME = "exp_001/train_data_step7.jsonl"
G, T = drawn(0, 3), drawn(1, 6)


def sample(index: int = 0, **changed: object) -> dict:
    """A prompt of 2, a response of 2, a tool's token, 1 more of the response, padding of 2."""
    fields = {
        "content": ["what\nit says"],
        "rewards": [1.0],
        "input_lengths": [6],
        "token_ids": [[5, 6, 7, 8, 9, 10, 0, 0]],
        "token_loss_mask": [[0, 0, 1, 1, 0, 1, 0, 0]],
        "sample_loss_mask": [1.0],
        "advantages": [[0.5] * 8],
        "generation_logprobs": [[0.0, 0.0, G[0], G[1], 0.0, G[2], 0.0, 0.0]],
        "prev_logprobs": [[0.0, *T[1:], 0.0, 0.0]],
        "idx": index,
    }
    return fields | changed


def un_nested(record: dict) -> dict:
    return {k: v[0] if isinstance(v, list) else v for k, v in record.items()}


@pytest.mark.parametrize("change", [copy.copy, un_nested])
@pytest.mark.parametrize("format", ["nemo-rl", "auto"])
def test_every_field(imported, format: str, change) -> None:
    lines(Path(NAME), [change(sample()), change(sample(1))])
    manifest, read = imported(format, "exp_001")
    assert (manifest.format, manifest.framework) == ("nemo-rl", "NeMo-RL")
    assert list(read.ids) == ["7:0", "7:1"]
    assert read.steps.tolist() == [7, 7]
    assert manifest.steps == (7,)
    assert read.offsets.tolist() == [0, 6, 12], "padding is cut"
    assert read.token_ids[:6].tolist() == [5, 6, 7, 8, 9, 10]
    assert read.prompt_lengths.tolist() == [2, 2]
    assert read.scored[:6].tolist() == [False, False, True, True, False, True]
    assert read.rollout_missing[:6].tolist() == [True, True, False, False, True, False]
    assert read.rollout[[2, 3, 5]].tolist() == G
    assert read.train_missing[:6].tolist() == [True] + [False] * 5, "the trainer scores prompts"
    assert read.train[1:6].tolist() == T[1:]
    assert read.groups[0] == read.groups[1] is not None
    assert read.rewards.tolist() == [1.0, 1.0]
    assert manifest.compared == manifest.scored == 6
    assert manifest.sources[0].size == Path(NAME).stat().st_size
    assert any("0.0" in note for note in manifest.notes)


@pytest.mark.parametrize(
    ("g", "t", "missing"),
    [(0.0, -0.04, False), (0.0, 0.0, False), (0.0, -0.06, False), (-9999.0, -1.0, True)],
)
def test_a_scored_zero_is_a_value(imported, g: float, t: float, missing: bool) -> None:
    record = sample()
    record["generation_logprobs"][0][3] = g
    record["prev_logprobs"][0][3] = t
    lines(Path(NAME), [record])
    manifest, read = imported("nemo-rl", NAME)
    assert read.rollout_missing[3] == missing
    assert manifest.rollout_missing == missing
    assert read.scored[3], "a missing value is reported, not left out"


def test_what_is_not_finite_is_a_value(imported) -> None:
    record = sample()
    record["generation_logprobs"][0][2] = float("nan")
    record["prev_logprobs"][0][3] = float("-inf")
    lines(Path(NAME), [record])
    _, read = imported("nemo-rl", NAME)
    assert np.isnan(read.rollout[2])
    assert read.train[3] == -np.inf
    assert not read.rollout_missing[2]
    assert not read.train_missing[3]


def test_a_sample_in_no_loss_scores_nothing(imported) -> None:
    lines(Path(NAME), [sample(), sample(1, sample_loss_mask=[0.0])])
    manifest, read = imported("nemo-rl", NAME)
    assert read.scored.sum() == 3
    assert read.mask_rewritten.tolist() == [False, True]
    assert any("sample_loss_mask" in note for note in manifest.notes)


def test_token_0_is_in_no_loss(imported) -> None:
    lines(Path(NAME), [sample(token_loss_mask=[[1] * 8])])
    _, read = imported("nemo-rl", NAME)
    assert read.scored.tolist() == [False] + [True] * 5


def test_of_a_step_written_twice_the_later_is_read(imported) -> None:
    for folder, reward in (("exp_001", 1.0), ("exp_002", 2.0)):
        lines(Path(folder) / "train_data_step7.jsonl", [sample(rewards=[reward])])
    lines(Path("exp_001/train_data_step10.jsonl"), [sample()])
    manifest, read = imported("nemo-rl", ".")
    assert read.steps.tolist() == [7, 10]
    assert read.rewards.tolist() == [2.0, 1.0]
    (skipped,) = manifest.skipped
    assert skipped.startswith("exp_001/train_data_step7.jsonl: step 7 was written again")


def test_a_last_line_that_is_cut_off_is_told(imported) -> None:
    path = lines(Path(NAME), [sample(), sample(1)])
    path.write_text(path.read_text()[:-40])
    manifest, read = imported("nemo-rl", NAME)
    assert len(read) == 1
    assert "line 2, the last, is cut off" in manifest.skipped[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"token_ids": None}, "token_ids is null"),
        ({"token_ids": [["5"] * 8]}, "token_ids has entries of type string"),
        ({"token_ids": [[5.5] * 8]}, "not integers"),
        ({"token_ids": [[2**70] * 8]}, "token_ids"),
        ({"token_loss_mask": [[2] * 8]}, "0 and 1"),
        ({"token_loss_mask": [[1] * 4]}, "4 entries, 6 are expected"),
        ({"generation_logprobs": [["a"] * 8]}, "generation_logprobs"),
        ({"prev_logprobs": [[True] * 8]}, "prev_logprobs has entries of type bool"),
        ({"prev_logprobs": [[-1.0]]}, "prev_logprobs"),
        ({"input_lengths": [-1]}, "negative"),
        ({"input_lengths": [1e400]}, "input_lengths"),
        ({"input_lengths": "6"}, "input_lengths is a text"),
        ({"sample_loss_mask": ["yes"]}, "sample_loss_mask"),
    ],
)
def test_a_wrong_value_is_named_with_its_line(imported, change: dict, said: str) -> None:
    lines(Path(NAME), [sample(), sample(1, **change)])
    with pytest.raises(DumpError, match=f"line 2: .*{said}"):
        imported("nemo-rl", NAME)


@pytest.mark.parametrize("field", ["token_ids", "prev_logprobs", "token_loss_mask"])
def test_a_field_that_is_absent_is_named(imported, field: str) -> None:
    record = sample()
    del record[field]
    lines(Path(NAME), [record])
    with pytest.raises(DumpError, match=f"{field}: missing"):
        imported("nemo-rl", NAME)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "is empty"),
        (b"\n\n", "no sequence"),
        (b"[]\n", "not a JSON object"),
        (b"{]\n{}\n", "not JSON"),
        (b"\xff\xfe\n", "UTF-8"),
        (b"[" * 100_000 + b"\n", "line 1"),
        (b'{"idx": ' + b"9" * 5000 + b"}\n", "line 1"),
    ],
)
def test_what_is_no_dump_is_refused(imported, text: bytes, said: str) -> None:
    Path("train_data_step1.jsonl").write_bytes(text)
    with pytest.raises(DumpError, match=said):
        imported("nemo-rl", "train_data_step1.jsonl")


def test_a_line_in_the_middle_that_is_cut_off_is_an_error(imported) -> None:
    path = lines(Path(NAME), [sample()])
    path.write_text(json.dumps(sample())[:-40] + "\n" + path.read_text())
    with pytest.raises(DumpError, match="line 1"):
        imported("nemo-rl", NAME)
