"""A program: what `paged_schedule` and a call that is given its schedule launch is what the call
launches alone, in the same order with the same arguments, on an H200 that is not there.

Prints the kernels of calls with lists, and in how many cases anything differs. With `--fault`, a
call that is given a schedule leaves out a launch. Not under TRITON_INTERPRET, so in a process of
its own, with kernels/ and tests/support/ on its path (`tests/compiled/test_replayed_launches.py`).
"""

import sys
from contextlib import ExitStack
from unittest import mock

import rlk_kernels as rk
import torch
from offline_h200 import h200
from replayed_launches import empty, integers
from rlk_kernels.ops.attention import forward, merge, schedule
from rlk_kernels.ops.attention.hopper import blocks, pieces

MODULES = (forward, blocks, pieces, merge, schedule)
LISTS = ("_shared_kernel", "_schedule_kernel")
CASES = [
    (sequences, queries, pages, heads, window, dtype)
    for sequences in (1, 2, 16, 80)
    for queries in (1, 5, 300)
    for pages in (32, 64, 2560)
    for heads in ((32, 8, 128), (6, 6, 80))
    for window in (None, 200)
    for dtype in (torch.bfloat16, torch.float32)
]


def said(x: object) -> object:
    """An argument as far as it is known before anything runs."""
    if isinstance(x, torch.Tensor):
        aligned = x.storage_offset() * x.element_size() % 16 == 0
        return tuple(x.shape), x.stride(), x.dtype, aligned
    return x


def main(fault: bool) -> int:
    launched, kernels, other = [], set(), 0

    def record(cache, kernel, grid, arguments, options):
        named = kernel.__name__, grid, [said(x) for x in arguments], options
        launched.append(named)

    def launches(function, *arguments, **options) -> tuple[list, object]:
        launched.clear()
        result = function(*arguments, **options)
        return list(launched), result

    with h200(), ExitStack() as stack:
        for module in MODULES:
            stack.enter_context(mock.patch.object(module, "launch", record, create=True))
        for sequences, queries, pages, (heads, kv_heads, dim), window, dtype in CASES:
            q = empty(sequences * queries, heads, dim, dtype=dtype)
            cache = empty(64, 16, kv_heads, dim, dtype=dtype)
            arguments = q, cache, cache, integers(sequences, pages), integers(sequences)
            options = {"cu_seqlens_q": integers(sequences + 1), "window": window}
            alone, _ = launches(rk.paged_attention, *arguments, **options)
            first, made = launches(rk.paged_schedule, *arguments, **options)
            rest, _ = launches(rk.paged_attention, *arguments, **options, schedule=made)
            rest = rest[fault:]
            lists = [x for x in alone if x[0] in LISTS]
            other += first != lists or rest != [x for x in alone if x[0] not in LISTS]
            other += (made is None) != (not lists)
            if lists:
                kernels |= {x[0] for x in alone}
    print("relaunched:", *sorted(kernels))
    print("other:", other)
    return int(bool(other) or not kernels)


if __name__ == "__main__":
    sys.exit(main("--fault" in sys.argv))
