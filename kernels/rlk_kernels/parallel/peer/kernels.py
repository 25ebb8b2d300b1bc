"""The kernel of `gather`: store to peers, tell them, wait for them, copy out.

A program is a channel: it has a part of the shard, a slot for it in every rank's region, and a
counter of its launches, the epoch, which is the same on all ranks because they launch alike. It
stores its part into its slot of every peer's region, then the epoch into its flag there (released),
waits until its own flags have come that far (acquired), and copies the slots out.

A slot exists twice, for even and odd epochs. The one of epoch e is written again in epoch e + 2. A
rank starts that when its epoch e + 1 has ended, for which every peer must have started epoch e + 1,
and so have ended epoch e: all of this on one stream. No second message says "I have read it".

Nothing waits for ever: a program looks at flags `polls` times. Then it writes down whose it was
and gives all ones, which are NaN, for that rank. Launches behind it neither store nor tell, because
they do not know what peers have read, and do not wait: they give NaN at once.

W = words of a shard: 8, 4 or 2 bytes   F = words of a row   R = ranks
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.launching import cdiv, launch
from rlk_kernels.memory import empty
from rlk_kernels.parallel.peer.channels import BLOCK_BYTES, CHANNELS, Channels

WARPS = 16
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
_COUNT = tl.constexpr(CHANNELS)


@triton.jit
def _slot(region, source, channel, odd, kind, RANKS: tl.constexpr, CAPACITY: tl.constexpr):
    """A channel's slot for what `source` stores, in a rank's region."""
    flags: tl.constexpr = (_COUNT * RANKS * 4 + 1023) // 1024 * 1024
    at = (odd * RANKS + source) * _COUNT + channel
    return tl.multiple_of((region + flags + at.to(tl.int64) * CAPACITY).to(kind), 16)


@triton.jit
def _flag(region, source, channel, RANKS: tl.constexpr):
    """A channel's flag for `source` in a rank's region."""
    return (region + (channel * RANKS + source) * 4).to(tl.pointer_type(tl.int32))


@triton.jit(do_not_specialize=["steps", "polls"])
def _gather_kernel(
    x, out, regions, counters, failed, missing, words, row, steps, polls,
    RANK: tl.constexpr, RANKS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[W / F, R, F] of x[W]. regions: address of each rank's region; counters[CHANNELS]; failed:
    one number, not 0 once a rank was missing; missing[R]: the epoch in which a rank was missed, in
    the host's memory; steps: blocks of a program; CAPACITY: bytes of a slot."""
    channel = tl.program_id(0)
    epoch = tl.load(counters + channel) + 1
    odd = epoch & 1
    begin = channel * steps * BLOCK
    kind = tl.pointer_type(x.dtype.element_ty)
    lanes = tl.arange(0, BLOCK)
    works = tl.load(failed) == 0
    to_peers = tl.where(works, words, 0)

    for step in range(steps):
        inside = step * BLOCK + lanes
        at = begin + inside
        here = at < words
        value = tl.load(x + at, here)
        for peer in tl.static_range(RANKS):
            if peer == RANK:
                tl.store(out + (at // row * RANKS + RANK) * row + at % row, value, here)
            else:
                slot = _slot(tl.load(regions + peer), RANK, channel, odd, kind, RANKS, CAPACITY)
                tl.store(slot + inside, value, at < to_peers)

    # All threads have stored before one of them tells.
    tl.debug_barrier()
    if works:
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                flag = _flag(tl.load(regions + peer), RANK, channel, RANKS)
                tl.atomic_xchg(flag, epoch, sem="release", scope="sys")

    own = tl.load(regions + RANK)
    left = tl.where(works, polls, 0)
    for source in tl.static_range(RANKS):
        if source != RANK:
            flag = _flag(own, source, channel, RANKS)
            ahead = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - epoch
            while (ahead < 0) & (left > 0):
                ahead = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - epoch
                left -= 1
            if ahead < 0:
                tl.store(missing + source, epoch)
                tl.store(failed, 1)
            arrived = tl.where(ahead < 0, 0, words)
            slot = _slot(own, source, channel, odd, kind, RANKS, CAPACITY)
            for step in range(steps):
                inside = step * BLOCK + lanes
                at = begin + inside
                here = at < words
                # past the caches of a processor, which do not see what peers store
                value = tl.load(slot + inside, at < arrived, other=-1, cache_modifier=".cg")
                tl.store(out + (at // row * RANKS + source) * row + at % row, value, here)
    tl.store(counters + channel, epoch)


def columns(x: Tensor, shared: Channels) -> Tensor:
    """[..., R F] of x[..., F]."""
    x, row = x.contiguous(), x.shape[-1] * x.element_size()
    # Of the shape alone: all ranks must cut alike.
    word = next(w for w in _WORDS if row % w == 0)
    x = x.clone() if x.data_ptr() % word else x
    out = empty((*x.shape[:-1], shared.ranks * x.shape[-1]), x.dtype, x.device)
    words, block = x.numel() * x.element_size() // word, BLOCK_BYTES // word
    steps = cdiv(words, CHANNELS * block)
    launch(
        None, _gather_kernel, (cdiv(words, steps * block), 1, 1),
        (
            x.view(-1).view(_WORDS[word]), out.view(-1).view(_WORDS[word]), shared.regions,
            shared.counters, shared.failed, shared.missing, words, row // word, steps, shared.polls,
            shared.rank, shared.ranks, shared.slot, block,
        ),
        {"num_warps": WARPS},
    )  # fmt: skip
    return out
