"""Measures the host time of one eager call of every operator, beside F.linear, on small inputs.

A call is timed until it returns; the GPU is empty before each turn and never the limit. Operators
take turns, and each is divided by F.linear of the same round, because the speed of a shared host
changes from second to second. All kernels are compiled first, several at a time.
"""

import statistics
import time

import rlk_kernels as rk
import torch
import torch.nn.functional as F
from rlk_kernels.ahead import compiled_ahead
from timing import rand

CALLS = 20
"""Calls of a turn: their kernels fit into the queue, so that the host never waits."""
ROUNDS = 40


def turn_us(call) -> float:
    """Microseconds of host time of one call."""
    call()  # warms the host's caches, which the other operators have used
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def calls(m: int = 16) -> dict:
    """Every public operator on m rows, as an engine without gradients calls it."""
    h, v = 1024, 4096
    x, big, weight, gain = rand(m, h), rand(2048, h), rand(h, h), rand(h)
    q, k = rand(m, 8, 128), rand(m, 2, 128)
    cu = torch.arange(0, m + 1, m, device="cuda").int()
    one = torch.arange(m + 1, device="cuda").int()
    cache = rand(64, 16, 2, 128)
    lens = torch.full((m,), 64, device="cuda").int()
    tables = {n: torch.zeros(m, n, device="cuda").int() for n in (4, 2560)}
    wide = q, cache, cache, tables[2560], lens
    schedule = rk.paged_schedule(*wide, cu_seqlens_q=one)
    ids = torch.arange(m, device="cuda")
    head = rand(v, h)
    logits = rand(m, v)
    advantages, mask = torch.ones(1, device="cuda"), torch.ones(1, m, device="cuda")
    positions = torch.arange(m, device="cuda")
    batch, batch_ids = x[None], ids[None]
    return {
        "F.linear": lambda: F.linear(x, weight),
        "linear": lambda: rk.linear(x, weight),
        "linear, 2048 rows": lambda: rk.linear(big, weight),
        "rms_norm": lambda: rk.rms_norm(x, gain, 1e-6),
        "rms_norm, residual": lambda: rk.rms_norm(x, gain, 1e-6, residual=x),
        "rope": lambda: rk.rope(q, k, positions, theta=1e6),
        "swiglu": lambda: rk.swiglu(x, x),
        "embedding": lambda: rk.embedding(ids, head),
        "attention": lambda: rk.attention(q, k, k, cu, cu),
        "paged_attention": lambda: rk.paged_attention(
            q, cache, cache, tables[4], lens, cu_seqlens_q=one
        ),
        "paged_attention, its own list": lambda: rk.paged_attention(*wide, cu_seqlens_q=one),
        "paged_attention, a given list": lambda: rk.paged_attention(
            *wide, cu_seqlens_q=one, schedule=schedule
        ),
        "paged_schedule": lambda: rk.paged_schedule(*wide, cu_seqlens_q=one),
        "logp": lambda: rk.logp(logits, ids),
        "linear_logp": lambda: rk.linear_logp(x, head, ids),
        "linear_grpo_loss": lambda: rk.linear_grpo_loss(
            batch, head, batch_ids, None, advantages, mask
        )[0],
    }


def measure(ceilings: dict) -> list[dict]:
    """For each operator the medians of its microseconds and of the ratio to F.linear in the same
    round."""
    rk.warm_up("cuda")
    with torch.no_grad():
        every = calls()
        with compiled_ahead(torch.device("cuda")):
            for call in every.values():
                call()
        rounds = [{name: turn_us(call) for name, call in every.items()} for _ in range(ROUNDS)]
    return [
        {
            "operator": name,
            "us": statistics.median(x[name] for x in rounds),
            "ratio": statistics.median(x[name] / x["F.linear"] for x in rounds),
        }
        for name in every
    ]
