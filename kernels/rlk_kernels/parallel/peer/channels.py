"""What `kernels` works on: channels, and the regions that ranks share.

R = ranks
"""

from dataclasses import dataclass

from torch import Tensor

CHANNELS = 64
"""Programs at most: few enough to be resident at once."""
BLOCK_BYTES = 8192
"""What a program copies at a time: 16 bytes a thread."""


@dataclass(frozen=True, slots=True)
class Channels:
    """Those of one rank."""

    rank: int
    ranks: int
    slot: int
    """Bytes of a slot."""
    polls: int
    """How often a program looks at flags that do not come."""
    regions: Tensor
    """int64 [R]: address of each rank's region, as this process sees it."""
    counters: Tensor
    """int32 [CHANNELS]: launches of each channel so far."""
    failed: Tensor
    """int32 [1]: not 0 once a rank was missing."""
    missing: Tensor
    """int32 [R], in the host's memory: the epoch in which a rank was missing, or 0."""


def slot_bytes(capacity: int) -> int:
    """Of a channel, for shards of up to so many bytes."""
    return -(-capacity // (CHANNELS * BLOCK_BYTES)) * BLOCK_BYTES


def region_bytes(ranks: int, capacity: int) -> int:
    """Of a rank: flags, and two slots for each source and channel."""
    flags = -(-CHANNELS * ranks * 4 // 1024) * 1024
    return flags + 2 * ranks * CHANNELS * slot_bytes(capacity)
