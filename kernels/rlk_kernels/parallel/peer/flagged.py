"""The kernel of `gather` for few bytes, which minimizes latency; `kernels` has the other one.

Every 8 bytes that are stored to a peer consist of 4 bytes of the shard and the epoch. The receiver
polls them until they have the current epoch, so there is no separate message after the data, and no
order of stores. The epochs are those of the channels in `kernels`. These slots have no other use,
because the other kernel's data could look like an epoch.

A slot exists twice, for even and odd epochs. The slot of epoch e is written again in epoch e + 2 at
the earliest. A rank starts that epoch when its launch of epoch e + 1 has ended, for which every
peer must have started the same launch, and so have ended epoch e. All launches are on one stream.

As in `kernels`, no wait is endless, and a missing rank is named.

T = rows of a shard   F = words of a row, 4 bytes each   R = ranks
"""

import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.device import facts
from rlk_kernels.launching import ShapeCache, cdiv, launch
from rlk_kernels.parallel.peer.channels import FLAGGED_WORDS, Channels, flagged_offset

WARPS = 8
_WORDS = tl.constexpr(FLAGGED_WORDS)


@triton.jit
def _message_slot(region, source, channel, epoch, RANKS: tl.constexpr, COUNT: tl.constexpr):
    """The messages of a channel from `source`, in a rank's region after the slots of `kernels`."""
    at = ((epoch & 1) * RANKS + source) * COUNT + channel
    return tl.multiple_of(
        (region + at.to(tl.int64) * (_WORDS * 8)).to(tl.pointer_type(tl.int64)), 16
    )


@triton.jit(do_not_specialize=["rows", "polls"])
def _flagged_kernel(
    x, out, regions, counters, failed, missing, rows, F, polls,
    RANK: tl.constexpr, RANKS: tl.constexpr, COUNT: tl.constexpr, BEHIND: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """out[T, R, F] of x[T, F]; each program copies a block. BEHIND: the bytes of a region before
    the messages. The other arguments are those of `kernels._gather_kernel`."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    channel = tl.program_id(0)
    epoch = tl.load(counters + channel) + 1
    works = tl.load(failed) == 0
    lanes = tl.arange(0, _WORDS)
    at = channel * _WORDS + lanes
    here = at < rows * F
    to_peers = tl.where(works, rows * F, 0)
    to = out + at // F * (RANKS * F) + at % F
    value = tl.load(x + at, here, other=0)
    message = (epoch.to(tl.int64) << 32) | (value.to(tl.int64) & 0xFFFFFFFF)
    for peer in tl.static_range(RANKS):
        if peer == RANK:
            tl.store(to + RANK * F, value, here)
        else:
            region = tl.load(regions + peer) + BEHIND
            slot = _message_slot(region, RANK, channel, epoch, RANKS, COUNT)
            tl.store(slot + lanes, message, at < to_peers)
    own = tl.load(regions + RANK) + BEHIND
    left = tl.where(works, polls, 0)
    for source in tl.static_range(RANKS):
        if source != RANK:
            slot = _message_slot(own, source, channel, epoch, RANKS, COUNT) + lanes
            message = tl.load(slot, here, other=0, volatile=True)
            late = tl.sum((here & ((message >> 32).to(tl.int32) != epoch)).to(tl.int32), 0)
            while (late > 0) & (left > 0):
                message = tl.load(slot, here, other=0, volatile=True)
                late = tl.sum((here & ((message >> 32).to(tl.int32) != epoch)).to(tl.int32), 0)
                left -= 1
            if late > 0:
                tl.store(missing + source, epoch)
                tl.store(failed, 1)
            there = (message >> 32).to(tl.int32) == epoch
            tl.store(to + source * F, tl.where(there, message.to(tl.int32), -1), here)
    tl.store(counters + channel, epoch)


def columns(cache: ShapeCache, x: Tensor, out: Tensor, shared: Channels) -> None:
    """out[T, R, F] of x[T, F], contiguous words of 4 bytes."""
    (rows, f), overlap = x.shape, facts(x.device).overlaps
    launch(
        cache, _flagged_kernel, (cdiv(rows * f, FLAGGED_WORDS), 1, 1),
        (
            x, out.view(x.dtype), shared.regions, shared.counters, shared.failed, shared.missing,
            rows, f, shared.polls, shared.rank, shared.ranks, shared.count,
            flagged_offset(shared.ranks, shared.count), overlap,
        ),
        {"num_warps": WARPS, "launch_pdl": overlap},
    )  # fmt: skip
