"""The shape of a tile of the matrix product, and how it is run."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """One shape of the kernel's tile, with what goes with it."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group: int = 8
    """Row tiles that share a column tile while it is in L2."""
    subtile: bool = False
    """Write the output tile in two halves of columns: frees shared memory for one more stage."""
    flatten: bool = False
    """One software pipeline across output tiles."""
    overlap: int = 1
    """On Hopper, this kernel starts while its predecessor ends, waits for it, and lets its own
    successor start 1: at once, 2: when it is done. 0: nothing overlaps. It changes no bit."""
    swap: bool = False
    """Compute the transposed tile, so that weights fill the 64 rows of wgmma at small M."""
    tail: int = 0
    """Columns of the tiles behind the last full wave: a part of a wave takes a part of its time."""
    warp_specialized: bool = False
    """On Hopper, copies and products run in warps of their own (`hopper/product.py`): m is a
    multiple of 64 and n one of 8, or, with `swap`, n and m are."""

    @property
    def groups(self) -> int:
        """How many groups of four warps multiply in `hopper/product.py`; 0 for a tile of another
        kernel."""
        return (self.n if self.swap else self.m) // 64 if self.warp_specialized else 0

    @property
    def flat(self) -> int:
        """Rows of the operand that all groups read."""
        return self.m if self.swap else self.n

    def count(self, m: int, n: int) -> int:
        """Tiles of an [m, n] output."""
        return -(-m // self.m) * -(-n // self.n)

    def wide_columns(self, m: int, n: int, processors: int) -> int:
        """The columns that tiles of full width cover: with a tail, those of the full waves."""
        if not self.tail:
            return n
        rows = -(-m // self.m)
        waves = rows * (n // self.n) // processors
        return (waves * processors // rows if waves else n // self.n) * self.n


def evenly(length: int, tile: int, unit: int = 1) -> int:
    """How far from each other the tiles of a side lie, a multiple of `unit` if `tile` is: all have
    about as much of it."""
    count = -(-length // tile)
    return min(tile, -(-length // (unit * count)) * unit)
