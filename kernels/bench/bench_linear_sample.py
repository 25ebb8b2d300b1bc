"""Times `linear_sample` beside `linear` and `sample`: the LM head and the tokens of a step of
decode.

T = rows   H = hidden size   V = vocabulary
"""

from functools import partial

import rlk_kernels as rk
import torch
from bench_sample import of_rows
from timing import graphs_ms, rand

HIDDEN, VOCABULARY = 4096, 151_936
ROWS = (1, 16, 64, 256)
TEMPERATURES = {"greedy": 0.0, "plain": 0.8}
LOGITS = (torch.float32, torch.bfloat16)
MIB = 1 << 20


def in_two_steps(hidden, weight, keys, positions, *, logit_dtype, **options) -> rk.Sampled:
    """All logits, then their tokens."""
    logits = rk.linear(hidden, weight, out_dtype=logit_dtype)
    return rk.sample(logits, keys, positions, **options)


def peak_mib(call) -> float:
    """The memory that a call takes at most, beyond its arguments."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def measure(ceilings: dict) -> list[dict]:
    """Microseconds of a call; the time in two steps divided by ours; the share of the bandwidth
    that one read of the weight would take; the most memory in MiB."""
    weights = [rand(VOCABULARY, HIDDEN, scale=2.0 * HIDDEN**-0.5) for _ in range(2)]
    records = []
    for dtype in LOGITS:
        for rows in ROWS:
            hidden = [rand(rows, HIDDEN) for _ in weights]
            keys = torch.arange(rows, device="cuda")
            positions = torch.full((rows,), 1000, device="cuda")
            for name, temperature in TEMPERATURES.items():
                options = {**of_rows(rows, {"temperature": temperature}), "logit_dtype": dtype}
                calls = {
                    way: [
                        partial(run, h, w, keys, positions, **options)
                        for h, w in zip(hidden, weights, strict=True)
                    ]
                    for way, run in (("fused", rk.linear_sample), ("two steps", in_two_steps))
                }
                us = {way: ms * 1e3 for way, ms in graphs_ms(calls).items()}
                nbytes = weights[0].numel() * weights[0].element_size()
                records.append({
                    "logits": str(dtype).removeprefix("torch."), "rows": rows, "setting": name,
                    "us": us, "two_steps_ratio": us["two steps"] / us["fused"],
                    "bandwidth_share": nbytes / us["fused"] / 1e3 / ceilings["copy_gbs"],
                    "mib": {way: peak_mib(of[0]) for way, of in calls.items()},
                })  # fmt: skip
    return records
