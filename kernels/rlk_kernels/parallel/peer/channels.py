"""What `kernels` works on: channels, and the regions that ranks share.

R = ranks
"""

from dataclasses import dataclass

from torch import Tensor

CHANNELS = 128
"""Programs at most: few enough to be resident at once."""
BLOCK_BYTES = 8192
"""What a program copies at a time: 16 bytes a thread."""
BLOCKS = 4
"""Of a piece, at most: so many that a message a piece costs little."""
SLOT_BYTES = BLOCKS * BLOCK_BYTES
SLOTS = 4
"""Of a channel and source: see `kernels`."""
FLAGGED_WORDS = 512
"""Of 4 bytes that a program copies in `flagged`, each with its epoch."""
FLAGGED_BYTES = 128 << 10
"""Of a rank's shard up to which that is faster."""


@dataclass(frozen=True, slots=True)
class Channels:
    """Those of one rank."""

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
    """Of a rank."""
    return flagged_offset(ranks, count) + 2 * ranks * count * FLAGGED_WORDS * 8
