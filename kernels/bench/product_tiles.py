"""The candidate tiles of `linear`: `tune_products.py` times them, and `fit_products.py` chooses."""

from rlk_kernels.matmul.tile import Tile

_BIG = {"subtile": True}
PLAIN = [
    # weights in the 64 rows of wgmma
    Tile(16, 64, 256, 4, 5, swap=True),
    Tile(16, 128, 128, 4, 5, swap=True),
    Tile(32, 64, 256, 4, 4, swap=True),
    Tile(32, 128, 128, 4, 5, swap=True),
    # few rows and columns
    Tile(16, 16, 256, 4, 6),
    Tile(16, 32, 256, 4, 5),
    Tile(64, 16, 256, 4, 5),
    Tile(64, 32, 256, 4, 4),
    Tile(64, 64, 128, 4, 6),
    Tile(64, 64, 128, 4, 5, flatten=True),
    Tile(64, 128, 64, 4, 7, flatten=True),
    Tile(64, 128, 128, 4, 4),
    Tile(64, 256, 64, 4, 4),
    Tile(64, 256, 64, 8, 4, flatten=True),
    Tile(128, 128, 64, 8, 5),
    Tile(128, 128, 64, 4, 5),
    Tile(128, 128, 64, 8, 4, flatten=True),
    # many of both
    Tile(128, 256, 64, 8, 4, **_BIG),
    Tile(128, 256, 64, 8, 4, flatten=True, **_BIG),
    Tile(128, 256, 64, 8, 4, group=16, flatten=True, **_BIG),
    Tile(128, 256, 64, 8, 4, flatten=True, tail=128, **_BIG),
    Tile(128, 256, 64, 8, 4, flatten=True, tail=64, **_BIG),
    Tile(128, 256, 64, 8, 4, group=16, flatten=True, tail=64, **_BIG),
    Tile(256, 128, 64, 8, 4, group=4, flatten=True, **_BIG),
]
SHARED = 225 << 10
"""Bytes of shared memory that the buffers of a tile may take."""
FEW = 152
"""The most rows of both operands with steps of 128 of K alone; up to BETWEEN a step is 64 or
128."""
BETWEEN = 208
MOST = {1: 256, 2: 256, 3: 200, 4: 136}
"""Groups -> the most rows of the flat operand that the registers have room for."""
LEAST = {1: 32, 2: 64, 3: 64, 4: 64}
"""Groups -> the fewest rows of the flat operand where they are columns of the output; where they
are its rows, the fewest are 8."""


def _specialized(groups: int, flat: int, k: int, swap: bool) -> Tile:
    """A tile of 64 x groups by flat, whose warps either copy or multiply, with all buffers that
    fit."""
    tall = 64 * groups
    stages = min(8, SHARED // ((tall + flat) * k * 2))
    m, n = (flat, tall) if swap else (tall, flat)
    return Tile(m, n, k, 4, stages, swap=swap, warp_specialized=True)


SPECIALIZED = [
    _specialized(groups, flat, k, swap)
    for swap in (False, True)
    for groups, most in MOST.items()
    for flat in range(8 if swap else LEAST[groups], most + 1, 8)
    for k in (64, 128)
    if (k == 64 and 64 * groups + flat > FEW) or (k == 128 and 64 * groups + flat <= BETWEEN)
]
CANDIDATES = [*PLAIN, *SPECIALIZED]
