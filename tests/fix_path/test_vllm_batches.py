"""The real vLLM by itself, in batches of every kind."""

from typing import Any

import pytest
from bit_equal import Bits
from pair_models import MODELS

BATCHES: dict[str, dict[str, Any]] = {
    "default": {},
    "seven, prefix caching": {"max_num_seqs": 7, "enable_prefix_caching": True},
    "too few blocks": {
        "block_size": 32, "num_gpu_blocks_override": 34, "disable_log_stats": False,
    },
}  # fmt: skip
IN_FP32: dict[str, dict[str, Any]] = {
    "default": {},
    "seven, chunks of 40, prefix caching": {
        "max_num_seqs": 7, "max_num_batched_tokens": 40, "enable_prefix_caching": True,
    },
}  # fmt: skip
"""Several times slower, so a quarter of the prompts by default."""
WHOLE: dict[str, dict[str, Any]] = {
    "default": {},
    **{f"{n} at a time": {"max_num_seqs": n} for n in (1, 2, 7, 64)},
    **{f"chunks of {n}": {"max_num_batched_tokens": n, "max_num_seqs": 8} for n in (40, 64)},
    "no chunks": {"enable_chunked_prefill": False, "max_num_batched_tokens": 1024},
    "prefix caching": {"enable_prefix_caching": True},
    **{f"blocks of {n}": {"block_size": n} for n in (32, 128)},
    "one at a time, blocks of 128": {"max_num_seqs": 1, "block_size": 128},
    "two, chunks of 64": {"max_num_seqs": 2, "max_num_batched_tokens": 64},
}


@pytest.mark.parametrize(
    ("model", "dtype", "batches", "step"),
    [
        ("embedded", "bfloat16", BATCHES, 1),
        ("embedded", "float32", IN_FP32, 4),
        *(
            pytest.param(model, dtype, WHOLE, 1, marks=pytest.mark.whole_matrix)
            for model in ("embedded", "sparse")
            for dtype in ("bfloat16", "float32")
        ),
    ],
)
def test_bits_do_not_depend_on_the_batch(
    vllm_bits: Bits, model: str, dtype: str, batches: dict[str, dict[str, Any]], step: int
) -> None:
    common = {"kernels": "registered", "model": str(MODELS[model].path)}
    cases = [
        common | {"name": name, "options": {"dtype": dtype} | options}
        for name, options in batches.items()
    ]
    answers = vllm_bits(cases, step)
    first = answers["default"]
    assert len(first["decode"]) == 64 // step
    if model == "sparse":
        assert {"route", "grouped_linear", "combine_experts"} <= set(first["ran"])
    for name, one in answers.items():
        assert one["decode"] == one["prefill"], name
        for what in ("tokens", "decode", "prefill"):
            assert one[what] == first[what], name
        assert bool(one["cached"]) == ("prefix caching" in name), name
        assert bool(one["preempted"]) == (name == "too few blocks"), name
