"""A few prompts in every layout: batches, padding and packing of the trainers; batches, chunks,
blocks and cached prefixes of vLLM."""

from collections.abc import Callable
from pathlib import Path

import pytest
from bit_equal import assert_equal
from command import Cli, require_engine, write_few_prompts

LAYOUTS = (
    *("hf:batch=4,padding=right", "hf:batch=1"),
    *("megatron:batch=4,padding=left", "megatron:batch=6,padding=right", "megatron:batch=1"),
    "vllm:max_num_seqs=1,block_size=128",
    "vllm:max_num_seqs=3,max_num_batched_tokens=64,enable_prefix_caching=1",
    "vllm:max_num_seqs=64,enable_prefix_caching=1",
)
IN_FP32 = (
    *("hf:batch=4,padding=left", "megatron:input=packed", "fsdp:dp=2"),
    "vllm:max_num_seqs=2,max_num_batched_tokens=64",
)
"""Rows that other dtypes lay out alike: each layout has one dtype by default, and both in the whole
matrix."""
ONE_OPTION = (
    *("vllm:max_num_seqs=1", "vllm:max_num_seqs=2", "vllm:max_num_seqs=64"),
    *("vllm:max_num_batched_tokens=64", "vllm:enable_prefix_caching=1", "vllm:block_size=128"),
)
"""What the layouts above combine, each by itself."""


@pytest.mark.parametrize("train", ["hf", "megatron"])
def test_processed_logprobs_are_those_at_the_temperature(
    compare: Cli, folder: Path, train: str
) -> None:
    """As RL frameworks sample: what vLLM says of a token is of the logits that it drew from."""
    require_engine("vllm")
    prompts = write_few_prompts(folder / "few.jsonl")
    done = compare(
        *("--rollout", "vllm:kernels=rlk,temperature=0.7,logprobs=processed"),
        *("--train", f"{train}:kernels=rlk,temperature=0.7", "--edges", "decode_vs_train"),
        *("--prompts", prompts, "--max-new-tokens", 8, "--run-dir", folder / "processed"),
    )
    assert done.code == 0, done.out + done.err
    assert done.verdict is not None
    edge = done.verdict["edges"]["decode_vs_train"]
    assert edge["tokens"] == done.verdict["tokens"] > 30
    assert edge["bit_mismatches"] == 0


def test_a_rank_without_a_sample_computes_no_logprob(compare: Cli, folder: Path) -> None:
    """One prompt for two ranks: the second has no call to count, and that is no error."""
    (one := folder / "one.jsonl").write_text('{"id": "p", "prompt": "Once upon a time"}\n')
    done = compare(
        *("--rollout", "hf:kernels=rlk", "--train", "fsdp:dp=2,kernels=rlk"),
        *("--prompts", one, "--max-new-tokens", 4, "--run-dir", folder / "one"),
    )
    assert_equal(done, 1)


@pytest.mark.parametrize(
    ("engine", "dtype"),
    [
        *((e, "bfloat16") for e in LAYOUTS),
        *((e, "float32") for e in IN_FP32),
        *(pytest.param(e, "bfloat16", marks=pytest.mark.whole_matrix) for e in IN_FP32),
        *(
            pytest.param(e, dtype, marks=pytest.mark.whole_matrix)
            for e in ONE_OPTION
            for dtype in ("bfloat16", "float32")
        ),
    ],
)
def test_a_layout_moves_no_bit(
    compare: Cli, folder: Path, sampled: Callable[..., str], engine: str, dtype: str
) -> None:
    require_engine(engine.partition(":")[0])
    done = compare(
        *("--rollout", sampled(dtype, few=True), "--run-dir", folder / "run"),
        *("--train", f"{engine},dtype={dtype},kernels=rlk"),
        *("--edges", "prefill_vs_train,decode_vs_train"),
    )
    assert_equal(done, 100, {"prefill_vs_train", "decode_vs_train"})
