"""What `kernels` and `flagged` work on: channels, and the regions that ranks share.

R = ranks
"""

from dataclasses import dataclass

from torch import Tensor

CHANNELS = 256
"""Programs at most: few enough to be resident at once."""
PIECE_BYTES = 8192, 16384
"""What a program copies at a time, 16 or 32 bytes a thread: the smaller where each program has one
piece, otherwise the larger, so that a message for each piece costs little."""
SLOT_BYTES = PIECE_BYTES[-1]
SLOTS = 4
"""Slots of a channel for each source, a power of two: see `kernels`."""
FLAGGED_WORDS = 512
"""Words of 4 bytes that a program copies in `flagged`, each with its epoch."""


@dataclass(frozen=True, slots=True)
class Channels:
    """The channels of one rank."""

    rank: int
    ranks: int
    count: int
    polls: int
    """How often a program looks at flags that do not come."""
    regions: Tensor
    """int64 [R]: address of each rank's region, as this process sees it."""
    counters: Tensor
    """int32 [count]: pieces of each channel so far."""
    failed: Tensor
    """int32 [1]: not 0 once a rank was missing."""
    missing: Tensor
    """int32 [R], in the host's memory: the epoch in which a rank was missing, or 0."""


def flagged_offset(ranks: int, count: int) -> int:
    """Bytes of a region before the messages of `flagged`: flags, and slots of each source and
    channel."""
    flags = -(-count * ranks * 4 // 1024) * 1024
    return flags + SLOTS * ranks * count * SLOT_BYTES


def region_bytes(ranks: int, count: int = CHANNELS) -> int:
    """Bytes of a rank's region."""
    return flagged_offset(ranks, count) + 2 * ranks * count * FLAGGED_WORDS * 8


def flagged_bytes(count: int) -> int:
    """Bytes of a rank's shard that `flagged` takes at most."""
    return 4 * FLAGGED_WORDS * count
