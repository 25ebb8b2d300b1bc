"""A recorded request, as a dump has it, and what a dump lacks."""

from typing import Any

import pyarrow as pa
import pytest

from rlk_align.errors import DumpError
from rlk_align.logs.dumps.sequences import Sequences
from rlk_align.logs.dumps.table import SCHEMA, sequences_of
from rlk_align.logs.replay.request import of_dump


def dump(**changed: Any) -> list[Sequences]:
    row = {
        "id": "a", "step": 3, "prompt_length": 2, "token_ids": [5, 6, 7, 8, 9],
        "rollout_logprobs": [None, None, -0.5, None, -0.25], "sampler": "rlk",
        "seeds": [None, None, 11, None, -(2**63)],
        "sampling": {"temperature": 0.7, "top_k": -1, "top_p": 0.9, "min_p": 0.0,
                     "logprobs_mode": "processed_logprobs"},
    }  # fmt: skip
    rows = [row | {"id": "b"}, row | changed, row | {"step": 4}]
    return [sequences_of(pa.RecordBatch.from_pylist([one], schema=SCHEMA)) for one in rows]


def test_a_request_is_what_its_record_says() -> None:
    request = of_dump(dump(), "a", 3)
    assert request.ids == (5, 6, 7, 8, 9)
    assert request.at.tolist() == [2, 4]
    assert request.seeds.tolist() == [11, -(2**63)]
    assert request.logprobs.tolist() == [-0.5, -0.25]
    assert (request.temperature, request.limits, request.processed) == (0.7, {"top_p": 0.9}, True)
    (sample,) = request.batch.samples
    assert (sample.prompt_ids, sample.response_ids) == ((5, 6), (7, 8, 9))


def test_no_token_of_the_prompt_was_drawn() -> None:
    request = of_dump(dump(seeds=[11] * 5), "a", 3)
    assert request.at.tolist() == [2, 3, 4]
    assert of_dump(dump(seeds=[11] * 5, prompt_length=0), "a", 3).at.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("changed", "step", "error"),
    [
        ({}, None, "has 2 requests 'a', of the steps 3, 4"),
        ({}, 7, "no request 'a' of step 7"),
        ({"sampler": None}, 3, "'a' does not say what drew its tokens"),
        ({"sampler": "flashinfer"}, 3, "'a' says 'flashinfer' drew"),
        ({"sampling": {"top_p": 0.9}}, 3, "'a' does not state its temperature"),
        ({"seeds": None}, 3, "'a' has no seed of any token"),
        ({"seeds": [11, 12, None, None, None]}, 3, "'a' has no seed of any token"),
    ],
)
def test_what_a_dump_lacks_is_named(changed: dict, step: int | None, error: str) -> None:
    with pytest.raises(DumpError, match=error):
        of_dump(dump(**changed), "a", step)


def test_an_unknown_request_is_named_with_those_that_are_there() -> None:
    with pytest.raises(DumpError, match="no request 'nobody'") as raised:
        of_dump(dump(), "nobody", None)
    assert raised.value.fix == "it has b, a, a"
