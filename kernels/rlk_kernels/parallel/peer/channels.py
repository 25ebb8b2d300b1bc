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


def region_bytes(ranks: int, count: int = CHANNELS) -> int:
    """Of a rank: flags, and the slots of each source and channel."""
    flags = -(-count * ranks * 4 // 1024) * 1024
    return flags + SLOTS * ranks * count * SLOT_BYTES
