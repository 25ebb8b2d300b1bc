"""Paged decode as an engine runs it: block tables wider than any context, ragged batches, prefixes
that a group shares, decodes beside a prefill. Heads 32/8 of 128, blocks of 16, bf16.
"""

import functools

import rlk_kernels as rk
import torch
from timing import copies, graphs_ms

HEADS = (32, 8, 128)
PAGE = 16
BATCHES = (1, 16, 64, 256)
CONTEXTS = (512, 1024, 4096, 16384)
WIDTHS = (0, 8192, 40960, 131072)
"""Tokens that the block table has room for; 0: the longest context's."""
MIB = 1 << 20


def rand(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def decode(lens: list[int], width: int = 0, queries: list[int] | None = None, share: int = 0):
    """Over a cache of its own: a call that makes its own list, one that is given it (or None, where
    there is none), and the bytes of keys and values that either has to read.

    queries: of each sequence, 1 where not given. share: tokens of one prompt that all begin with.
    """
    hq, hk, d = HEADS
    pages = [-(-(n - share) // PAGE) for n in lens]
    prompt = share // PAGE
    blocks = prompt + sum(pages)
    order = torch.randperm(blocks, device="cuda").int()
    table = torch.zeros(len(lens), max(-(-width // PAGE), max(pages) + prompt), device="cuda").int()
    used = prompt
    for b, count in enumerate(pages):
        table[b, :prompt] = order[:prompt]
        table[b, prompt : prompt + count] = order[used : used + count]
        used += count
    queries = queries or [1] * len(lens)
    k, v = (rand(blocks, PAGE, hk, d) for _ in range(2))
    q = rand(sum(queries), hq, d)
    cu = torch.tensor([0, *queries], device="cuda").cumsum(0).int()
    context = torch.tensor(lens, device="cuda").int()

    schedule = rk.paged_schedule(q, k, v, table, context, cu_seqlens_q=cu)
    call = functools.partial(rk.paged_attention, q, k, v, table, context, cu_seqlens_q=cu)
    listed = None if schedule is None else functools.partial(call, schedule=schedule)
    return call, listed, 4 * blocks * PAGE * hk * d


def microseconds(make, nbytes: int) -> dict[str, float]:
    """Of one call that makes its own list, and of one that is given it, where there is one;
    rotating over as many inputs as outgrow the L2."""
    made = [make() for _ in range(copies(nbytes, most=8))]
    calls = {"own": [call for call, _, _ in made], "given": [listed for _, listed, _ in made]}
    times = graphs_ms({k: x for k, x in calls.items() if None not in x}, target_ms=2.0)
    return {name: 1e3 * ms for name, ms in times.items()}


def scratch_mib(call) -> float:
    """What a call holds beyond its results."""
    out = call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = call()
    torch.cuda.synchronize()
    results = out.nbytes + 4 * out.shape[0] * out.shape[1]
    return (torch.cuda.max_memory_allocated() - before - results) / MIB


def widths(ceilings: dict) -> list[dict]:
    """Every batch, context and width: microseconds, with a given list too, shares of the copy
    bandwidth, scratch."""
    records = []
    for batch in BATCHES:
        for context in CONTEXTS:
            nbytes = 4 * batch * context * HEADS[1] * HEADS[2]
            us, given_us, scratch = {}, {}, {}
            for width in WIDTHS:
                if 0 < width <= context:
                    continue
                make = functools.partial(decode, [context] * batch, width)
                times = microseconds(make, nbytes)
                us[width] = times["own"]
                if "given" in times:
                    given_us[width] = times["given"]
                scratch[width] = scratch_mib(make()[0])
                torch.cuda.empty_cache()
            share = nbytes / us[0] / 1e3 / ceilings["copy_gbs"]
            records.append(
                {"batch": batch, "context": context, "us": us, "given_us": given_us,
                 "scratch_mib": scratch, "bandwidth_share": share}
            )  # fmt: skip
    return records


CASES = {
    "8 sequences of 4096": ([4096] * 8, None, 0),
    "512 sequences of 4096 + 16": ([4112] * 512, None, 0),
    "512 of 4096 + 16 on one prompt of 4096": ([4112] * 512, None, 4096),
    "64 of 4096 + 512 on one prompt of 4096": ([4608] * 64, None, 4096),
    "64 of 4096 + 512": ([4608] * 64, None, 0),
    "1 of 131072 beside 63 of 1024": ([131072] + [1024] * 63, None, 0),
    "64 decodes of 4096": ([4096] * 64, None, 0),
    "prefill of 2048 alone": ([2048], [2048], 0),
    "64 decodes of 4096 beside a prefill of 2048": (
        [4096] * 64 + [2048], [1] * 64 + [2048], 0,
    ),
    "1 decode of 131072 beside a prefill of 2048": ([131072, 2048], [1, 2048], 0),
}  # fmt: skip
"""name -> (keys of each sequence, queries of each, tokens of a shared prompt)."""


def batches(ceilings: dict) -> list[dict]:
    """CASES, in tables for 131,072 tokens."""
    records = []
    for name, (lens, queries, share) in CASES.items():
        *_, nbytes = decode(lens, 131072, queries, share)
        times = microseconds(functools.partial(decode, lens, 131072, queries, share), nbytes)
        us = times["own"]
        records.append(
            {"case": name, "us": us, "given_us": times.get("given"), "gbs": nbytes / us / 1e3}
        )
        torch.cuda.empty_cache()
    return records
