"""Times paged decode as an engine runs it, with block tables wider than any context. Heads 32/8 of
128, blocks of 16, bf16."""

import functools

import rlk_kernels as rk
import torch
from timing import copies, graphs_ms, rand

HEADS = (32, 8, 128)
PAGE = 16
BATCHES = (1, 16, 64, 256)
CONTEXTS = (512, 1024, 4096, 16384)
WIDTHS = (0, 8192, 40960, 131072)
"""Tokens that the block table has room for; 0 stands for the context's own number."""
MIB = 1 << 20


def decode(sequences: int, context: int, width: int):
    """(a call that makes its own schedule, a call that is given the schedule, or None where decode
    needs none): one query for each of several sequences, over a new cache."""
    hq, hk, d = HEADS
    pages = context // PAGE
    blocks = sequences * pages
    table = torch.zeros(sequences, max(-(-width // PAGE), pages), device="cuda").int()
    table[:, :pages] = torch.randperm(blocks, device="cuda").int().view(sequences, pages)
    k, v = (rand(blocks, PAGE, hk, d) for _ in range(2))
    q, cu = rand(sequences, hq, d), torch.arange(sequences + 1, device="cuda").int()
    lens = torch.full((sequences,), context, device="cuda").int()

    schedule = rk.paged_schedule(q, k, v, table, lens, cu_seqlens_q=cu)
    call = functools.partial(rk.paged_attention, q, k, v, table, lens, cu_seqlens_q=cu)
    return call, None if schedule is None else functools.partial(call, schedule=schedule)


def microseconds(make, nbytes: int) -> dict[str, float]:
    """Microseconds of a call that makes its own schedule, and of one that is given a schedule,
    where there is one; the inputs rotate, and together outgrow the L2."""
    made = [make() for _ in range(copies(nbytes, most=8))]
    calls = dict(zip(("own", "given"), zip(*made, strict=True), strict=True))
    times = graphs_ms({k: x for k, x in calls.items() if None not in x}, target_ms=2.0)
    return {name: 1e3 * ms for name, ms in times.items()}


def scratch_mib(call) -> float:
    """The memory that a call needs beyond its results."""
    out = call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = call()
    torch.cuda.synchronize()
    results = out.nbytes + 4 * out.shape[0] * out.shape[1]
    return (torch.cuda.max_memory_allocated() - before - results) / MIB


def widths(ceilings: dict) -> list[dict]:
    """For every batch, context and width: microseconds, also with a given schedule, the share of
    the copy bandwidth, and scratch memory."""
    records = []
    for batch in BATCHES:
        for context in CONTEXTS:
            nbytes = 4 * batch * context * HEADS[1] * HEADS[2]
            us, given_us, scratch = {}, {}, {}
            for width in WIDTHS:
                if 0 < width <= context:
                    continue
                make = functools.partial(decode, batch, context, width)
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
