"""The tile shapes of the matrix product, and the choice of one for a shape.

Every tile gives the same bits (`self_check.py` checks that on each device), so the choice affects
the time alone and may depend on M. It is the measured tile (`tile_costs.py`) with the least
predicted time (`tile_time.py`).
"""

import functools
from dataclasses import replace

import torch

from rlk_kernels.matmul.tile import Tile
from rlk_kernels.matmul.tile_costs import COSTS
from rlk_kernels.matmul.tile_time import Candidate, candidates, fastest

SAFE = Tile(128, 128, 64, 8, 3)
"""The one tile used where the self-check fails."""
SAFE_SPLIT = Tile(128, 128, 64, 8, 5)
"""SAFE for split products."""
FLOAT32 = Tile(64, 64, 32, 4, 2)
INTERPRETED = Tile(32, 32, 32, 4, 1)
INTERPRETED_LOGITS = Tile(64, 128, 32, 4, 1)

STATISTICS = Tile(128, 256, 64, 8, 4, group=16, flatten=True, warp_specialized=True)
"""The tile of the logits' statistics (`epilogue.py`: STATS)."""
STORE = Tile(128, 256, 64, 8, 3, group=16, flatten=True, warp_specialized=True)
"""The tile of the epilogues that store a tile (EXPONENTIALS, GRADIENT)."""
SPLIT = Tile(128, 256, 64, 8, 4, group=16, warp_specialized=True)
"""The tile of split products that fill a GPU of the Hopper generation (LOGITS)."""
PICK = Tile(16, 16, 128, 4, 3)
"""The tile of the logits of given ids, of which only the diagonal is used."""
PICK_FLOAT32 = Tile(16, 16, 32, 4, 3)

# of `accumulate`: tile, microseconds to start a wave, microseconds per unit of K and wave
_PARTIAL: list[tuple[Tile, float, float]] = [
    (Tile(64, 64, 128, 4, 4), 1.9, 0.00228),
    (Tile(64, 128, 64, 4, 6), 2.7, 0.00314),
    (Tile(128, 128, 64, 8, 4), 2.7, 0.00528),
    (Tile(128, 256, 64, 8, 3, group=16), 3.3, 0.0103),
]

SINGLE = (FLOAT32, PICK_FLOAT32, INTERPRETED, INTERPRETED_LOGITS)
"""Tiles that need no check, because fp32 products and the interpreter add one by one."""


def as_product(tile: Tile) -> Tile:
    """`tile` as the product kernel can run it: its fp32 output takes shared memory too, and
    `overlap` does not change a product."""
    if tile in (STATISTICS, STORE, SPLIT):
        tile = replace(tile, warp_specialized=False, subtile=True)
    return replace(tile, overlap=1)


def product_tiles(specialized: bool = True) -> list[Tile]:
    """Every distinct tile of products with 16-bit operands, and of the kernels with an epilogue, as
    the product kernel can run them; `specialized` as in `tile_for`."""
    chosen = [tile for tile in COSTS if specialized or not tile.warp_specialized]
    used = [*chosen, SAFE, SAFE_SPLIT, STATISTICS, STORE, SPLIT]
    return list(dict.fromkeys(as_product(tile) for tile in used))


def partial_tiles() -> list[Tile]:
    """Every tile that `accumulate` can be launched with."""
    return [tile for tile, _, _ in _PARTIAL] + [SAFE]


def with_overlap(tile: Tile, m: int, n: int, k: int, processors: int) -> Tile:
    """`tile` with the better overlap. A successor that starts at once helps where two kernels fit
    side by side or are short. Otherwise its tiles crowd the processors that this kernel left free
    (15 % lost at M=64, N=4096, K=14336)."""
    fits = 2 * tile.count(m, n) <= processors
    return replace(tile, overlap=1 if fits or k <= 1024 else 2)


def for_split(tile: Tile) -> Tile:
    """`tile` for split products: one accumulator, with registers for its high part."""
    if tile.warp_specialized or tile.m * tile.n > 64 * 32 * tile.warps:
        return SAFE_SPLIT
    return replace(tile, tail=0, flatten=False)


@functools.lru_cache(maxsize=4096)
def tile_for(
    m: int, n: int, k: int, dtype: torch.dtype, processors: int, *, trusted: bool = True,
    specialized: bool = True,
) -> Tile:  # fmt: skip
    """The tile for an [m, n] output over k, with `specialized` also a `Tile.warp_specialized` one.

    The choice changes the time and never the bits.
    """
    if dtype == torch.float32:
        return FLOAT32
    if not trusted:
        return SAFE
    return with_overlap(fastest(_candidates(specialized), m, n, k, processors), m, n, k, processors)


@functools.cache
def _candidates(specialized: bool) -> list[Candidate]:
    return candidates(
        {tile: cost for tile, cost in COSTS.items() if specialized or not tile.warp_specialized}
    )


def partial_tile_for(m: int, n: int, k: int, processors: int, trusted: bool) -> Tile:
    """The tile of `accumulate` for an [m, n] output over k; it changes the time alone."""

    def time(entry: tuple[Tile, float, float]) -> float:
        tile, start, per_k = entry
        tiles = -(-m // tile.m) * -(-n // tile.n)
        return -(-tiles // processors) * (start + per_k * k)

    return min(_PARTIAL, key=time)[0] if trusted else SAFE
