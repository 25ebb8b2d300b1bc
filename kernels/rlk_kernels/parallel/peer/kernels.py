"""The kernel of `gather`: store to peers, tell them, wait for them, copy out. (`flagged` has that
of few bytes.)

A program is a channel: it has pieces of the shard, slots for them in every rank's region, and a
counter of its pieces, the epoch, which is the same on all ranks because they launch alike. It
stores a piece into its slot of every peer's region, then the epoch into its flag there (released),
waits until its own flags have come that far (acquired), and copies the slots out. Of several pieces
it stores the next one before it waits, so that links and memory work at the same time.

Slots are taken in turns. A rank that stores epoch e has ended e - 2, which its peers had stored by
then; and who stores e - 2 has ended e - 4, of this launch or of one before. So four slots are
enough: all of this on one stream. No second message says "I have read it".

Nothing waits for ever: a program looks at flags `polls` times. Then it writes down whose it was
and gives all ones, which are NaN, for that rank. What is behind it, of this launch and of later
ones, neither stores nor tells, because nobody knows what peers have read, and does not wait: it
gives NaN at once.

W = words of a shard: 8, 4 or 2 bytes   F = words of a row   R = ranks
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.launching import cdiv, launch
from rlk_kernels.memory import empty
from rlk_kernels.parallel.peer import flagged
from rlk_kernels.parallel.peer.channels import (
    BLOCK_BYTES,
    BLOCKS,
    FLAGGED_BYTES,
    FLAGGED_WORDS,
    SLOT_BYTES,
    SLOTS,
    Channels,
)

WARPS = 16
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
_SLOTS, _SLOT_BYTES = tl.constexpr(SLOTS), tl.constexpr(SLOT_BYTES)


@triton.jit
def _slot(region, source, channel, epoch, kind, RANKS: tl.constexpr, COUNT: tl.constexpr):
    """A channel's slot for what `source` stores, in a rank's region."""
    flags: tl.constexpr = (COUNT * RANKS * 4 + 1023) // 1024 * 1024
    at = ((epoch % _SLOTS) * RANKS + source) * COUNT + channel
    return tl.multiple_of((region + flags + at.to(tl.int64) * _SLOT_BYTES).to(kind), 16)


@triton.jit
def _flag(region, source, channel, RANKS: tl.constexpr):
    """A channel's flag for `source` in a rank's region."""
    return (region + (channel * RANKS + source) * 4).to(tl.pointer_type(tl.int32))


@triton.jit
def _send(
    x, out, regions, begin, epoch, works, words, row, steps,
    RANK: tl.constexpr, RANKS: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the piece at `begin` to all peers and into `out`, and tell them, where it `works`."""
    channel = tl.program_id(0)
    kind = tl.pointer_type(x.dtype.element_ty)
    lanes = tl.arange(0, BLOCK)
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
                slot = _slot(tl.load(regions + peer), RANK, channel, epoch, kind, RANKS, COUNT)
                tl.store(slot + inside, value, at < to_peers)
    # All threads have stored, and read what the slots had before, before one of them tells.
    tl.debug_barrier()
    if works:
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                flag = _flag(tl.load(regions + peer), RANK, channel, RANKS)
                tl.atomic_xchg(flag, epoch, sem="release", scope="sys")


@triton.jit
def _receive(
    out, regions, failed, missing, begin, epoch, left, words, row, steps,
    RANK: tl.constexpr, RANKS: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy all peers' pieces at `begin` to `out` once they are there; how many looks are left, 0
    where one is not there."""
    channel = tl.program_id(0)
    kind = tl.pointer_type(out.dtype.element_ty)
    lanes = tl.arange(0, BLOCK)
    own = tl.load(regions + RANK)
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
            slot = _slot(own, source, channel, epoch, kind, RANKS, COUNT)
            for step in range(steps):
                inside = step * BLOCK + lanes
                at = begin + inside
                here = at < words
                # past the caches of a processor, which do not see what peers store
                value = tl.load(slot + inside, at < arrived, other=-1, cache_modifier=".cg")
                tl.store(out + (at // row * RANKS + source) * row + at % row, value, here)
    return left


@triton.jit(do_not_specialize=["pieces", "steps", "polls"])
def _gather_kernel(
    x, out, regions, counters, failed, missing, words, row, pieces, steps, polls,
    RANK: tl.constexpr, RANKS: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[W / F, R, F] of x[W]. regions: address of each rank's region; counters[COUNT]; failed:
    one number, not 0 once a rank was missing; missing[R]: the epoch in which a rank was missed, in
    the host's memory; pieces: of a program; steps: blocks of a piece."""
    channel = tl.program_id(0)
    before = tl.load(counters + channel)
    left = tl.where(tl.load(failed) == 0, polls, 0)
    # Of all programs together.
    size = tl.num_programs(0) * steps * BLOCK
    begin = channel * steps * BLOCK
    for piece in range(pieces + 1):
        if piece < pieces:
            _send(
                x, out, regions, begin + piece * size, before + piece + 1, left > 0, words, row,
                steps, RANK, RANKS, COUNT, BLOCK,
            )  # fmt: skip
        if piece > 0:
            left = _receive(
                out, regions, failed, missing, begin + (piece - 1) * size, before + piece, left,
                words, row, steps, RANK, RANKS, COUNT, BLOCK,
            )  # fmt: skip
    tl.store(counters + channel, before + pieces)


def columns(x: Tensor, shared: Channels) -> Tensor:
    """[..., R F] of x[..., F]."""
    x, row = x.contiguous(), x.shape[-1] * x.element_size()
    # Of the shape alone: all ranks must cut alike.
    size = x.numel() * x.element_size()
    few = row % 4 == 0 and size <= min(FLAGGED_BYTES, shared.count * FLAGGED_WORDS * 4)
    word = 4 if few else next(w for w in _WORDS if row % w == 0)
    x = x.clone() if x.data_ptr() % word else x
    out = empty((*x.shape[:-1], shared.ranks * x.shape[-1]), x.dtype, x.device)
    source, result = (y.view(-1).view(_WORDS[word]) for y in (x, out))
    if few:
        flagged.columns(source, result, row // word, shared)
    else:
        _in_pieces(source, result, row // word, shared)
    return out


def _in_pieces(x: Tensor, out: Tensor, row: int, shared: Channels) -> None:
    """out[W / F, R, F] of x[W]; row: F."""
    words, block = x.numel(), BLOCK_BYTES // x.element_size()
    blocks = cdiv(words, block)
    steps = min(BLOCKS, cdiv(blocks, shared.count))
    programs = min(shared.count, cdiv(blocks, steps))
    launch(
        None, _gather_kernel, (programs, 1, 1),
        (
            x, out, shared.regions, shared.counters, shared.failed, shared.missing, words, row,
            cdiv(blocks, programs * steps), steps, shared.polls, shared.rank, shared.ranks,
            shared.count, block,
        ),
        {"num_warps": WARPS},
    )  # fmt: skip
