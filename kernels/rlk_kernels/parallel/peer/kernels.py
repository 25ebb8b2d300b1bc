"""The kernel of `gather`: it stores to peers, notifies them, waits for them, and copies the data
out. (`flagged` has the kernel for few bytes.)

A program is a channel: it has pieces of the shard, slots for them in every rank's region, and a
counter of its pieces, the epoch, which is the same on all ranks because they make the same
launches. It stores a piece into its slot in every peer's region, then the epoch into its flag there
(release), waits until its own flags have this epoch (acquire), and copies the slots out. If it has
several pieces, it stores the next one before it waits, so that links and memory work at the same
time.

A piece takes the next slot in turn. A rank that stores epoch e has ended e - 2, which its peers had
stored by then; and a peer that stores e - 2 has ended e - 4, in this launch or an earlier one. So
four slots are enough, without a second message that confirms the reading. All launches are on one
stream.

No wait is endless: a program polls its flags `polls` times. Then it records the missing rank and
writes all ones, which are NaN, for that rank. Later pieces, in this launch and later ones, store
and notify nothing, because it is unknown which slots the peers have read; they do not wait, and
write NaN at once.

T = rows of a shard   F = words of a row, 8, 4 or 2 bytes each   R = ranks
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.device import facts
from rlk_kernels.launching import ShapeCache, cdiv, launch, shape_cache
from rlk_kernels.memory import empty
from rlk_kernels.parallel.peer import flagged
from rlk_kernels.parallel.peer.channels import (
    PIECE_BYTES,
    SLOT_BYTES,
    SLOTS,
    Channels,
    flagged_bytes,
)

WARPS = 16
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
_SLOTS, _SLOT_BYTES = tl.constexpr(SLOTS), tl.constexpr(SLOT_BYTES)


@triton.jit
def _slot(region, source, channel, epoch, kind, RANKS: tl.constexpr, COUNT: tl.constexpr):
    """A channel's slot for the data of `source`, in a rank's region."""
    flags: tl.constexpr = (COUNT * RANKS * 4 + 1023) // 1024 * 1024
    at = (
        (epoch & (_SLOTS - 1)) * RANKS + source
    ) * COUNT + channel  # epochs wrap around to negative numbers
    return tl.multiple_of((region + flags + at.to(tl.int64) * _SLOT_BYTES).to(kind), 16)


@triton.jit
def _flag(region, source, channel, RANKS: tl.constexpr):
    """A channel's flag for `source` in a rank's region."""
    return (region + (channel * RANKS + source) * 4).to(tl.pointer_type(tl.int32))


@triton.jit
def _send(
    x, out, regions, begin, epoch, works, rows, F,
    RANK: tl.constexpr, RANKS: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores the piece at `begin` to all peers and into `out`, and notifies the peers, if
    `works`."""
    channel = tl.program_id(0)
    kind = tl.pointer_type(x.dtype.element_ty)
    lanes = tl.arange(0, BLOCK)
    at = begin + lanes
    here = at < rows * F
    to_peers = tl.where(works, rows * F, 0)
    value = tl.load(x + at, here)
    for peer in tl.static_range(RANKS):
        if peer == RANK:
            tl.store(out + (at // F * RANKS + RANK) * F + at % F, value, here)
        else:
            slot = _slot(tl.load(regions + peer), RANK, channel, epoch, kind, RANKS, COUNT)
            tl.store(slot + lanes, value, at < to_peers)
    # All threads have stored, and read the slots' earlier data, before one of them notifies.
    tl.debug_barrier()
    if works:
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                flag = _flag(tl.load(regions + peer), RANK, channel, RANKS)
                tl.atomic_xchg(flag, epoch, sem="release", scope="sys")


@triton.jit
def _receive(
    out, regions, failed, missing, begin, epoch, left, rows, F,
    RANK: tl.constexpr, RANKS: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies the peers' pieces at `begin` to `out` when they have arrived; returns the number of
    polls that are left, 0 if a piece is missing."""
    channel = tl.program_id(0)
    kind = tl.pointer_type(out.dtype.element_ty)
    lanes = tl.arange(0, BLOCK)
    at = begin + lanes
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
            arrived = tl.where(ahead < 0, 0, rows * F)
            slot = _slot(own, source, channel, epoch, kind, RANKS, COUNT)
            # bypasses the processor's caches, which do not see the stores of peers
            value = tl.load(slot + lanes, at < arrived, other=-1, cache_modifier=".cg")
            tl.store(out + (at // F * RANKS + source) * F + at % F, value, at < rows * F)
    return left


@triton.jit(do_not_specialize=["rows", "pieces", "polls"])
def _gather_kernel(
    x, out, regions, counters, failed, missing, rows, F, pieces, polls,
    RANK: tl.constexpr, RANKS: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """out[T, R, F] of x[T, F]. regions, counters, failed, missing: see `channels.Channels`; pieces:
    the number of pieces of a program."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    channel = tl.program_id(0)
    before = tl.load(counters + channel)
    left = tl.where(tl.load(failed) == 0, polls, 0)
    size = tl.num_programs(0) * BLOCK  # of a piece of each program
    begin = channel * BLOCK
    for piece in range(pieces + 1):
        if piece < pieces:
            _send(
                x, out, regions, begin + piece * size, before + piece + 1, left > 0, rows, F,
                RANK, RANKS, COUNT, BLOCK,
            )  # fmt: skip
        if piece > 0:
            left = _receive(
                out, regions, failed, missing, begin + (piece - 1) * size, before + piece, left,
                rows, F, RANK, RANKS, COUNT, BLOCK,
            )  # fmt: skip
    tl.store(counters + channel, before + pieces)


def columns(x: Tensor, shared: Channels) -> Tensor:
    """[..., R F] from x[..., F]."""
    x, row = x.contiguous(), x.shape[-1] * x.element_size()
    # These follow from the shape alone, because all ranks must make the same pieces.
    size = x.numel() * x.element_size()
    few = row % 4 == 0 and size <= flagged_bytes(shared.count)
    word = 4 if few else next(w for w in _WORDS if row % w == 0)
    x = x.clone() if x.data_ptr() % word else x
    out = empty((*x.shape[:-1], shared.ranks * x.shape[-1]), x.dtype, x.device)
    cache = shape_cache("peer", size, row, shared.rank, shared.ranks, shared.count, x.device)
    source = x.view(_WORDS[word]).view(-1, row // word)
    (flagged.columns if few else _in_pieces)(cache, source, out, shared)
    return out


def _in_pieces(cache: ShapeCache, x: Tensor, out: Tensor, shared: Channels) -> None:
    """out[T, R, F] of x[T, F]."""
    rows, f = x.shape
    nbytes = rows * f * x.element_size()
    block = PIECE_BYTES[nbytes > PIECE_BYTES[0] * shared.count]
    blocks = cdiv(nbytes, block)
    programs = min(shared.count, blocks)
    overlap = facts(x.device).overlaps
    launch(
        cache, _gather_kernel, (programs, 1, 1),
        (
            x, out.view(x.dtype), shared.regions, shared.counters, shared.failed, shared.missing,
            rows, f, cdiv(blocks, programs), shared.polls, shared.rank, shared.ranks, shared.count,
            block // x.element_size(), overlap,
        ),
        {"num_warps": WARPS, "launch_pdl": overlap},
    )  # fmt: skip
