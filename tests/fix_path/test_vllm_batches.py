"""The real vLLM by itself, in batches of every kind."""

from typing import Any

import pytest
from bit_equal import Bits

DTYPES = ("bfloat16", "float32")


BATCHES: dict[str, dict[str, Any]] = {
    "default": {},
    "one at a time": {"max_num_seqs": 1},
    "two": {"max_num_seqs": 2},
    "seven": {"max_num_seqs": 7},
    "all": {"max_num_seqs": 64},
    "chunks of 40": {"max_num_batched_tokens": 40, "max_num_seqs": 8},
    "chunks of 64": {"max_num_batched_tokens": 64},
    "no chunks": {"enable_chunked_prefill": False, "max_num_batched_tokens": 1024},
    "prefix caching": {"enable_prefix_caching": True},
    "blocks of 32": {"block_size": 32},
    "blocks of 128": {"block_size": 128},
    "too few blocks": {
        "block_size": 32, "num_gpu_blocks_override": 34, "disable_log_stats": False,
    },
}  # fmt: skip


IN_FP32 = ("default", "one at a time", "seven", "chunks of 40", "prefix caching")
"""Several times slower."""


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_batch(vllm_bits: Bits, dtype: str) -> None:
    cases = [
        {"name": name, "kernels": "registered", "options": {"dtype": dtype} | options}
        for name, options in BATCHES.items()
        if dtype == "bfloat16" or name in IN_FP32
    ]
    found = vllm_bits(cases)
    first = found["default"]
    assert len(first["decode"]) == 64
    for name, one in found.items():
        assert one["decode"] == one["prefill"], name
        for what in ("tokens", "decode", "prefill"):
            assert one[what] == first[what], name
        assert bool(one["cached"]) == (name == "prefix caching"), name
        assert bool(one["preempted"]) == (name == "too few blocks"), name
