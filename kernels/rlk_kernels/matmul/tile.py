"""The shape of a tile of the matrix product, and how a kernel runs it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """One shape of the kernel's tile, with its options."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group: int = 8
    """Row tiles that read a column tile while it is in L2."""
    subtile: bool = False
    """Write the output tile in two halves of columns, which frees shared memory for one more
    stage."""
    flatten: bool = False
    """One software pipeline across output tiles."""
    overlap: int = 1
    """On Hopper, this kernel starts while its predecessor ends, and waits for it. 1: its own
    successor may start at once; 2: it may start when this kernel is done; 0: nothing overlaps. No
    value changes a bit."""
    swap: bool = False
    """Compute the transposed tile, so that weights fill the 64 rows of wgmma at small M."""
    tail: int = 0
    """Columns of the tiles after the last full wave, which then takes only a part of a wave's
    time."""
    warp_specialized: bool = False
    """On Hopper, copies and products run in separate warps (`hopper/product.py`): m is a multiple
    of 64 and n one of 8, or with `swap` n is a multiple of 64 and m one of 8."""

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
    """The distance between the tiles of a side, so that all have about the same part of it; a
    multiple of `unit` if `tile` is one."""
    count = -(-length // tile)
    return min(tile, -(-length // (unit * count)) * unit)
