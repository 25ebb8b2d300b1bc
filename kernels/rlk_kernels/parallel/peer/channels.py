"""The channels of `kernels` and `flagged`, and the memory regions that ranks share.

R = ranks
"""

from dataclasses import dataclass

from torch import Tensor

CHANNELS = 256
"""The most programs of a launch, all of which can be resident at once."""
PIECE_BYTES = 8192, 16384
"""The bytes that a program copies at a time, 16 or 32 for each thread: the smaller number if each
program has one piece, and otherwise the larger, so that a message for each piece costs little."""
SLOT_BYTES = PIECE_BYTES[-1]
SLOTS = 4
"""The slots of a channel for each source, a power of two; see `kernels`."""
FLAGGED_WORDS = 512
"""The words of 4 bytes that a program copies in `flagged`, each with its epoch."""


@dataclass(frozen=True, slots=True)
class Channels:
    """The channels of one rank."""

    rank: int
    ranks: int
    count: int
    polls: int
    """How often a program polls flags before it gives up."""
    regions: Tensor
    """int64 [R]: the address of each rank's region in this process."""
    counters: Tensor
    """int32 [count]: the number of pieces of each channel so far."""
    failed: Tensor
    """int32 [1]: not 0 after a rank was missing."""
    missing: Tensor
    """int32 [R] in the host's memory: the epoch in which a rank was missing, or 0."""


def flagged_offset(ranks: int, count: int) -> int:
    """The bytes of a region before the messages of `flagged`: the flags, and the slots of each
    source and channel."""
    flags = -(-count * ranks * 4 // 1024) * 1024
    return flags + SLOTS * ranks * count * SLOT_BYTES


def region_bytes(ranks: int, count: int = CHANNELS) -> int:
    """The bytes of a rank's region."""
    return flagged_offset(ranks, count) + 2 * ranks * count * FLAGGED_WORDS * 8


def flagged_bytes(count: int) -> int:
    """The most bytes of a rank's shard that `flagged` gathers."""
    return 4 * FLAGGED_WORDS * count
