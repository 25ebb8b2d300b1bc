"""Tile shapes of the matrix product, and which one a shape gets.

Every tile gives the same bits (`self_check.py` checks it on the device at hand), so the choice is
about time alone and may depend on M. Up to 64 rows a product waits for the weights: wide K steps,
and transposed tiles, whose 64 wgmma rows are columns of the weight. Beyond, the time of a tile is
close to

    waves x (start + per_k x K)          waves = ceil(tiles / processors)

and the tile with the least of it is taken, except at shapes where a measurement found a better
one (`_MEASURED`). The two numbers per tile were fitted to CUDA-graph
timings on an H200 over the shapes of Llama-3-8B, Qwen3-0.6B and Qwen3-8B (bf16, M = 128 ... 8192).
"""

import functools
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Tile:
    """One shape of the kernel's tile, with what goes with it."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    n2: int = 0
    """Further columns with an accumulator of their own: tiles of 192 columns."""
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
    multiple of 64, or, with `swap`, n is, and n2 are further rows."""

    @property
    def rows(self) -> int:
        """Of the output."""
        return self.m + self.n2 if self.swap else self.m

    @property
    def columns(self) -> int:
        """Of the output."""
        return self.n if self.swap else self.n + self.n2


SAFE = Tile(128, 128, 64, 8, 3)
"""The one tile used where the self-check fails."""
SAFE_SPLIT = Tile(128, 128, 64, 8, 5)
"""SAFE for split products."""
FLOAT32 = Tile(64, 64, 32, 4, 2)
INTERPRETED = Tile(32, 32, 32, 4, 1)
INTERPRETED_LOGITS = Tile(64, 128, 32, 4, 1)

STATISTICS = Tile(128, 256, 64, 8, 4, group=16, flatten=True, warp_specialized=True)
"""Of the logits' statistics (`epilogue.py`: STATS)."""
STORE = Tile(128, 256, 64, 8, 3, group=16, flatten=True, warp_specialized=True)
"""Of the epilogues that store a tile (EXPONENTIALS, GRADIENT)."""
SPLIT = Tile(128, 256, 64, 8, 4, group=16, warp_specialized=True)
"""Of split products that fill a GPU of the Hopper generation (LOGITS)."""
PICK = Tile(16, 16, 128, 4, 3)
"""Of the logits of given ids: the diagonal counts."""
PICK_FLOAT32 = Tile(16, 16, 32, 4, 3)

# rows up to: [(columns up to, tile)]
_FEW_ROWS: list[tuple[int, list[tuple[int, Tile]]]] = [
    (16, [(26000, Tile(16, 64, 256, 4, 5, swap=True)),
          (1 << 62, Tile(16, 128, 128, 4, 5, swap=True))]),
    (32, [(26000, Tile(32, 64, 256, 4, 4, swap=True)),
          (1 << 62, Tile(32, 128, 128, 4, 5, swap=True))]),
    (64, [(2048, Tile(64, 16, 256, 4, 5)),
          (4096, Tile(32, 64, 256, 4, 4, swap=True)),
          (26000, Tile(64, 64, 128, 4, 6)),
          (1 << 62, Tile(64, 128, 128, 4, 4))]),
]  # fmt: skip

# tile, microseconds to start a wave, microseconds per unit of K and wave
_MANY_ROWS: list[tuple[Tile, float, float]] = [
    (Tile(64, 16, 256, 4, 5), 1.499, 0.001515),
    (Tile(64, 32, 256, 4, 4), 1.411, 0.001941),
    (Tile(64, 64, 128, 4, 6), 1.867, 0.002282),
    (Tile(64, 128, 64, 4, 8), 2.736, 0.003141),
    (Tile(64, 128, 128, 4, 4), 2.188, 0.003308),
    (Tile(64, 128, 64, 4, 6, n2=64), 3.162, 0.004909),
    (Tile(128, 128, 64, 8, 5), 2.728, 0.005276),
    (Tile(128, 128, 64, 8, 4, flatten=True), 1.059, 0.006132),
    (Tile(128, 128, 64, 8, 4, n2=64), 3.005, 0.008924),
    (Tile(128, 256, 64, 8, 4, subtile=True), 3.271, 0.010329),
    (Tile(128, 256, 64, 8, 4, group=16, subtile=True, flatten=True), 1.531, 0.011273),
]
_PROCESSORS = 132  # of the device the numbers are from

# tile, microseconds to start a wave, microseconds per unit of K and wave: of `accumulate`
_PARTIAL: list[tuple[Tile, float, float]] = [
    (Tile(64, 64, 128, 4, 4), 1.9, 0.00228),
    (Tile(64, 128, 64, 4, 6), 2.7, 0.00314),
    (Tile(128, 128, 64, 8, 4), 2.7, 0.00528),
    (Tile(128, 256, 64, 8, 3, group=16), 3.3, 0.0103),
]

# rows from, rows up to, columns, K, tile: where a measurement on the same device beat the formula
_MEASURED: list[tuple[int, int, int, int, Tile]] = [
    (6145, 8192, 1024, 2048, Tile(128, 256, 64, 8, 4, subtile=True, flatten=True)),
    (385, 512, 1024, 3072, Tile(64, 64, 128, 4, 6, group=4, overlap=2)),
    (769, 1024, 1024, 3072, Tile(64, 128, 128, 4, 4, overlap=2)),
    (6145, 8192, 1024, 3072, Tile(128, 256, 64, 8, 4, subtile=True, flatten=True)),
    (385, 512, 4096, 1024, Tile(128, 128, 64, 4, 5)),
    (6145, 8192, 4096, 1024, Tile(128, 256, 64, 8, 4, subtile=True, flatten=True)),
    (33, 64, 4096, 4096, Tile(32, 64, 256, 4, 4, overlap=2, swap=True)),
    (97, 128, 4096, 4096, Tile(64, 64, 128, 4, 6, overlap=2)),
    (193, 256, 4096, 4096, Tile(64, 128, 64, 4, 8, overlap=2)),
    (385, 512, 4096, 4096, Tile(128, 128, 64, 8, 5, overlap=2)),
    (1537, 2048, 4096, 4096, Tile(128, 256, 64, 8, 4, group=16, subtile=True)),
    (
        3073,
        4096,
        4096,
        4096,
        Tile(128, 256, 64, 8, 4, group=16, subtile=True, flatten=True, overlap=0),
    ),
    (
        6145,
        8192,
        4096,
        4096,
        Tile(128, 256, 64, 8, 4, group=32, subtile=True, flatten=True, overlap=2),
    ),
    (33, 64, 4096, 12288, Tile(32, 64, 256, 4, 4, overlap=2, swap=True)),
    (97, 128, 4096, 12288, Tile(64, 64, 128, 4, 6, overlap=2)),
    (193, 256, 4096, 12288, Tile(64, 128, 64, 4, 8, overlap=0)),
    (33, 64, 4096, 14336, Tile(32, 64, 256, 4, 4, overlap=2, swap=True)),
    (97, 128, 4096, 14336, Tile(64, 64, 128, 4, 6, overlap=2)),
    (193, 256, 4096, 14336, Tile(64, 128, 64, 4, 8, overlap=0)),
    (1537, 2048, 4096, 14336, Tile(128, 128, 64, 8, 5, group=16)),
    (1, 16, 6144, 1024, Tile(16, 64, 256, 4, 5, overlap=2, swap=True)),
    (17, 32, 6144, 1024, Tile(32, 64, 256, 4, 4, overlap=2, swap=True)),
    (33, 64, 6144, 1024, Tile(64, 64, 128, 4, 6, overlap=2)),
    (
        6145,
        8192,
        6144,
        1024,
        Tile(128, 256, 64, 8, 4, group=16, subtile=True, flatten=True, overlap=0),
    ),
    (1, 16, 6144, 4096, Tile(16, 64, 256, 4, 5, overlap=2, swap=True)),
    (17, 32, 6144, 4096, Tile(32, 64, 256, 4, 4, overlap=2, swap=True)),
    (33, 64, 6144, 4096, Tile(64, 64, 128, 4, 6, overlap=2)),
    (97, 128, 6144, 4096, Tile(64, 64, 128, 4, 5, n2=32, overlap=2)),
    (3073, 4096, 6144, 4096, Tile(128, 256, 64, 8, 4, group=32, subtile=True, flatten=True)),
    (6145, 8192, 6144, 4096, Tile(128, 256, 64, 8, 4, group=16, subtile=True)),
    (193, 256, 24576, 4096, Tile(128, 128, 64, 8, 6, overlap=2)),
    (385, 512, 24576, 4096, Tile(128, 256, 64, 8, 4, group=16, subtile=True, flatten=True)),
    (769, 1024, 24576, 4096, Tile(128, 256, 64, 8, 4, group=32, subtile=True, flatten=True)),
    (
        1537,
        2048,
        24576,
        4096,
        Tile(128, 256, 64, 8, 4, group=32, subtile=True, flatten=True, overlap=0),
    ),
    (3073, 4096, 24576, 4096, Tile(128, 256, 64, 8, 4, group=32, subtile=True, flatten=True)),
    (6145, 8192, 24576, 4096, Tile(128, 256, 64, 8, 4, group=16, subtile=True)),
    (1, 16, 28672, 4096, Tile(16, 128, 128, 4, 5, overlap=2, swap=True)),
    (17, 32, 28672, 4096, Tile(32, 128, 128, 4, 5, overlap=2, swap=True)),
    (33, 64, 28672, 4096, Tile(64, 128, 128, 4, 4, overlap=2)),
    (97, 128, 28672, 4096, Tile(128, 256, 64, 8, 4, subtile=True, overlap=2)),
    (193, 256, 28672, 4096, Tile(128, 256, 64, 8, 4, subtile=True, flatten=True, overlap=0)),
    (
        769,
        1024,
        28672,
        4096,
        Tile(128, 256, 64, 8, 4, group=16, subtile=True, flatten=True, overlap=0),
    ),
    (1537, 2048, 28672, 4096, Tile(128, 256, 64, 8, 4, group=16, subtile=True, flatten=True)),
    (
        3073,
        4096,
        28672,
        4096,
        Tile(128, 256, 64, 8, 4, group=32, subtile=True, flatten=True, overlap=0),
    ),
    (6145, 8192, 28672, 4096, Tile(128, 256, 64, 8, 4, group=32, subtile=True, flatten=True)),
    (193, 256, 6144, 1024, Tile(128, 64, 64, 4, 6, n2=32, warp_specialized=True)),
    (193, 256, 6144, 4096, Tile(64, 128, 64, 4, 6, n2=64, overlap=2, warp_specialized=True)),
    (97, 128, 6144, 1024, Tile(64, 64, 128, 4, 5, n2=32, warp_specialized=True)),
    (
        385,
        512,
        6144,
        4096,
        Tile(128, 128, 64, 4, 4, n2=64, group=4, overlap=2, warp_specialized=True),
    ),
    (385, 512, 6144, 1024, Tile(128, 128, 64, 4, 4, n2=64, group=4, warp_specialized=True)),
    (385, 512, 28672, 4096, Tile(128, 256, 64, 8, 4, subtile=True, flatten=True, tail=128)),
    (769, 1024, 6144, 4096, Tile(128, 128, 64, 4, 4, n2=64, overlap=2, warp_specialized=True)),
    (97, 128, 24576, 4096, Tile(128, 128, 64, 4, 4, n2=64, warp_specialized=True)),
]


SINGLE = (FLOAT32, PICK_FLOAT32, INTERPRETED, INTERPRETED_LOGITS)
"""Tiles that need no check: fp32 products and those of the interpreter are added one by one."""


def as_product(tile: Tile) -> Tile:
    """`tile` for the product kernel, whose fp32 output takes shared memory too; `overlap` changes
    nothing in a product."""
    if tile in (STATISTICS, STORE, SPLIT):
        tile = replace(tile, warp_specialized=False, subtile=True)
    return replace(tile, overlap=1)


def product_tiles() -> list[Tile]:
    """Every distinct tile that products of 16-bit operands can be launched with, and those of the
    kernels with an epilogue, as the product kernel can run them."""
    few = [tile for _, row in _FEW_ROWS for _, tile in row]
    many = [tile for tile, _, _ in _MANY_ROWS]
    measured = [tile for *_, tile in _MEASURED]
    with_epilogue = [STATISTICS, STORE, SPLIT]
    found = [*few, *many, *measured, SAFE, SAFE_SPLIT, *with_epilogue]
    return list(dict.fromkeys(as_product(tile) for tile in found))


def partial_tiles() -> list[Tile]:
    """Every tile that `accumulate` can be launched with."""
    return [tile for tile, _, _ in _PARTIAL] + [SAFE]


def tiles_in_use() -> list[Tile]:
    """Every tile that 16-bit operands can be launched with: what the self-check covers."""
    return list(dict.fromkeys([*product_tiles(), *partial_tiles(), PICK]))


def _tiles(tile: Tile, m: int, n: int) -> int:
    return -(-m // tile.rows) * -(-n // tile.columns)


def _with_overlap(tile: Tile, m: int, n: int, k: int) -> Tile:
    """A successor that starts at once helps where two kernels fit side by side or are short; else
    its tiles crowd the processors that this kernel left free (15 % lost at M=64, N=4096, K=14336).
    """
    fits = 2 * _tiles(tile, m, n) <= _PROCESSORS
    return replace(tile, overlap=1 if fits or k <= 1024 else 2)


def for_split(tile: Tile) -> Tile:
    """`tile` as split products take it: one accumulator, and registers for its high part."""
    if tile.m * tile.n > 64 * 32 * tile.warps:
        return SAFE_SPLIT
    return replace(tile, n2=0, tail=0, warp_specialized=False, flatten=False)


@functools.lru_cache(maxsize=4096)
def tile_for(m: int, n: int, k: int, dtype: torch.dtype, trusted: bool = True) -> Tile:
    """The tile for an [m, n] output over k. The choice changes the time and never the bits."""
    if dtype == torch.float32:
        return FLOAT32
    if not trusted:
        return SAFE
    for first, last, columns, depth, tile in _MEASURED:
        if first <= m <= last and (n, k) == (columns, depth):
            return tile
    for rows, by_columns in _FEW_ROWS:
        if m <= rows:
            tile = next(tile for columns, tile in by_columns if n <= columns)
            return _with_overlap(tile, m, n, k)

    def time(entry: tuple[Tile, float, float]) -> float:
        tile, start, per_k = entry
        waves = -(-_tiles(tile, m, n) // _PROCESSORS)
        if tile.flatten and waves == 1:
            return float("inf")  # one pipeline across tiles gains nothing from a lone tile
        return waves * (start + per_k * k)

    return _with_overlap(min(_MANY_ROWS, key=time)[0], m, n, k)


def partial_tile_for(m: int, n: int, k: int, processors: int, trusted: bool) -> Tile:
    """The tile of `accumulate` for an [m, n] output over k (time only)."""

    def time(entry: tuple[Tile, float, float]) -> float:
        tile, start, per_k = entry
        tiles = -(-m // tile.m) * -(-n // tile.n)
        return -(-tiles // processors) * (start + per_k * k)

    return min(_PARTIAL, key=time)[0] if trusted else SAFE
