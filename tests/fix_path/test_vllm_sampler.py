"""The kernels' sampler in the real vLLM: a request draws the same tokens with the same log-probs,
whatever runs beside it."""

import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from bit_equal import Bits
from command import Cli, require_engine, spec_here, write_few_prompts

DEFAULT: dict[str, dict[str, Any]] = {
    "default": {},
    "too few blocks": {
        "options": {"block_size": 32, "num_gpu_blocks_override": 34, "disable_log_stats": False},
        "order": "reversed",
    },
}
NO_CHUNKS = {"enable_chunked_prefill": False, "max_num_batched_tokens": 1024}
"""vLLM's own sampler fails on a CPU where a request with a seed is computed in chunks."""
WHOLE: dict[str, dict[str, Any]] = {
    **DEFAULT,
    "reversed, seven, chunks of 40": {
        "options": {"max_num_seqs": 7, "max_num_batched_tokens": 40}, "order": "reversed",
    },
    "alone": {"alone": True},
    **{f"{n} at a time": {"options": {"max_num_seqs": n}} for n in (1, 2, 7, 64, 256)},
    "prefix caching, chunks of 64": {
        "options": {"enable_prefix_caching": True, "max_num_batched_tokens": 64, "max_num_seqs": 8},
    },
    "no chunks": {"options": NO_CHUNKS},
    "fp32": {"options": {"dtype": "float32"}},
    "vLLM's own": {"sampler": False, "options": NO_CHUNKS},
}  # fmt: skip
OTHER = {"fp32", "vLLM's own"}
"""The cases whose draws differ: in fp32 in their log-probs, and vLLM's own in their tokens too."""


@pytest.mark.parametrize(
    ("cases", "step"), [(DEFAULT, 2), pytest.param(WHOLE, 1, marks=pytest.mark.whole_matrix)]
)
def test_a_request_draws_the_same_tokens_in_every_batch(
    vllm_draws: Bits, cases: dict[str, dict[str, Any]], step: int
) -> None:
    requests = 64 // step
    backwards = list(range(requests))[::-1]
    asked = [
        {"name": name, "new_tokens": 12} | case | ({"order": backwards} if "order" in case else {})
        for name, case in cases.items()
    ]
    answers = vllm_draws(asked, step)
    first = answers["default"]
    assert len(first["tokens"]) == requests
    # The settings are not all greedy: requests with the same prompt's beginning differ.
    assert len({tuple(tokens) for tokens in first["tokens"]}) > requests // 2
    for name, one in answers.items():
        same = [one[what] == first[what] for what in ("tokens", "logprobs")]
        if name == "fp32":  # other logits may draw the same tokens
            same[0] = False
        assert same == [name not in OTHER] * 2, name
        assert ("sample" in one["ran"]) == (name != "vLLM's own"), name
        assert bool(one["preempted"]) == (name == "too few blocks"), name


@pytest.mark.whole_matrix
def test_two_ranks_draw_the_tokens_of_one(vllm_draws: Bits) -> None:
    """Each rank is a process of its own, with half of the vocabulary."""
    ranks = {"one": 1, "two": 2}
    found = vllm_draws(
        [
            {"name": name, "new_tokens": 12, "options": {"tensor_parallel_size": count}}
            for name, count in ranks.items()
        ]
    )
    assert len(found["one"]["tokens"]) == 64
    for what in ("tokens", "logprobs"):
        assert found["two"][what] == found["one"][what]
    assert found["two"]["replaced"] == 0 < found["one"]["replaced"]


@pytest.mark.whole_matrix
def test_a_request_without_a_distribution_is_named(vllm_draws: Bits) -> None:
    rows = [[5, 6, 7], [9, 8, 999], [6, 6]]
    healthy = {"name": "healthy", "prompts": [rows[0], rows[2]]}
    found = vllm_draws([{"name": "poisoned", "prompts": rows, "poison": 999}, healthy])
    assert re.match(r"the logits of request 1(-\w+)? have NaN, \+inf", found["poisoned"]["error"])
    assert "error" not in found["healthy"]


SETTINGS = "temperature=0.7,top_k=40,top_p=0.9,min_p=0.01"


@pytest.mark.whole_matrix
def test_truncated_log_probs_are_those_of_the_trainer(folder: Path, compare: Cli) -> None:
    """vLLM and SGLang draw the same tokens, and HF scores them with the same bits."""
    require_engine("vllm")
    prompts = ("--prompts", write_few_prompts(folder / "few.jsonl"), "--max-new-tokens", "8")
    drawn = f"kernels=rlk,sampler=rlk,{SETTINGS},logprobs=processed"
    train = ("--train", f"hf:kernels=rlk,{SETTINGS}", *prompts, "--edges", "decode_vs_train")
    done = compare("--rollout", f"vllm:{drawn}", *train, "--run-dir", folder / "vllm")
    assert done.code == 0, done.out + done.err
    assert done.verdict["edges"]["decode_vs_train"]["bit_mismatches"] == 0
    assert done.verdict["precheck"]["mismatches"] == []
    # A limit that one side lacks is named before any number.
    without = train[1].replace(",top_k=40", "")
    other = compare("--rollout", f"vllm:{drawn}", "--train", without, *train[2:])
    assert other.code == 4
    names = {m["name"]: m["train"] for m in other.verdict["precheck"]["mismatches"]}
    assert names == {"top_k": None}
    require_engine("sglang")
    done = compare(
        "--rollout", spec_here(f"sglang:{drawn}"), *train, "--run-dir", folder / "sglang"
    )
    assert done.code == 0, done.out + done.err
    tokens = [
        next((folder / name / "captures").glob("rollout-*/tokens.parquet"))
        for name in ("vllm", "sglang")
    ]
    assert pq.read_table(tokens[0]).equals(pq.read_table(tokens[1]))
