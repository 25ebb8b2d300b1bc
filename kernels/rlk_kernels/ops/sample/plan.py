"""The blocks of columns of `sample`'s programs. No bit depends on them."""

import functools
from typing import NamedTuple

import torch

from rlk_kernels.device import DeviceFacts, facts
from rlk_kernels.launching import cdiv, power_of_2
from rlk_kernels.numerics.lse_tree.tree import LEAF, levels

COLUMNS, INTERPRETED_COLUMNS = 4096, 256
TREE_WARPS, WARPS = 1, 4
"""Of programs that compute nodes of blocks, and of the others."""


class Blocks(NamedTuple):
    """The columns of a row, in blocks that are whole subtrees."""

    columns: int
    """Of a block, a power of two."""
    count: int
    leaves: int
    """Of a block."""
    levels: int
    """Of the tree over a block's leaves."""
    row_levels: int
    """Of the tree over the blocks."""
    overlaps: bool
    """`DeviceFacts.overlaps`."""

    @property
    def padded(self) -> int:
        """The count, as a power of two."""
        return 1 << self.row_levels


@functools.cache
def _blocks(v: int, here: DeviceFacts) -> Blocks:
    columns = min(INTERPRETED_COLUMNS if here.interpreted else COLUMNS, max(power_of_2(v), LEAF))
    count, leaves = cdiv(v, columns), columns // LEAF
    return Blocks(columns, count, leaves, levels(leaves), levels(count), here.overlaps)


def blocks_of(v: int, device: torch.device) -> Blocks:
    """The blocks of V columns on a device."""
    return _blocks(v, facts(device))
