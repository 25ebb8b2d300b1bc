"""Tile shapes of the matrix product, and which one a shape gets.

Every tile gives the same bits (`cornerstone.py` checks it on the device at hand), so the choice is
about time alone and may depend on M. Up to 64 rows a product waits for the weights: wide K steps,
and transposed tiles, whose 64 wgmma rows are columns of the weight. Beyond, the time of a tile is
close to

    waves x (start + per_k x K)          waves = ceil(tiles / processors)

and the tile with the least of it is taken. The two numbers per tile were fitted to CUDA-graph
timings on an H200 over the shapes of Llama-3-8B, Qwen3-0.6B and Qwen3-8B (bf16, M = 128 ... 8192).
"""

import functools
from dataclasses import dataclass

import torch

from rlk_kernels.backend import interpreting


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
    swap: bool = False
    """Compute the transposed tile, so that weights fill the 64 rows of wgmma at small M."""


SAFE = Tile(128, 128, 64, 8, 3)
"""The one tile used where the corner-stone does not hold."""
FLOAT32 = Tile(64, 64, 32, 4, 2)
INTERPRETED = Tile(32, 32, 32, 4, 1)

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


def tiles_in_use() -> list[Tile]:
    """Every distinct bf16/fp16 tile that `tile_for` can return."""
    few = [tile for _, row in _FEW_ROWS for _, tile in row]
    return list(dict.fromkeys([*few, *(tile for tile, _, _ in _MANY_ROWS), SAFE]))


@functools.lru_cache(maxsize=4096)
def tile_for(m: int, n: int, k: int, dtype: torch.dtype, trusted: bool = True) -> Tile:
    """The tile for an [m, n] output over k. The choice changes the time and never the bits."""
    if interpreting():
        return INTERPRETED
    if dtype == torch.float32:
        return FLOAT32
    if not trusted:
        return SAFE
    for rows, by_columns in _FEW_ROWS:
        if m <= rows:
            return next(tile for columns, tile in by_columns if n <= columns)

    def time(entry: tuple[Tile, float, float]) -> float:
        tile, start, per_k = entry
        waves = -(-(-(-m // tile.m) * -(-n // (tile.n + tile.n2))) // _PROCESSORS)
        if tile.flatten and waves == 1:
            return float("inf")  # one pipeline across tiles gains nothing from a lone tile
        return waves * (start + per_k * k)

    return min(_MANY_ROWS, key=time)[0]
