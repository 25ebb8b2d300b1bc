"""A model of the time that a product takes with a tile, from seven measured numbers of the tile.

    microseconds = launch + ( arithmetic**4 + (megabyte x MB)**4 ) ** (1/4)
    arithmetic   = waves x (wave + step x K / 1000) + narrow waves x (wave + narrow x K / 1000)

A wave is one tile on each processor and ends with the slowest of them; narrow waves are those of
`Tile.tail`. MB is the memory that must be read and written once. Two factors change the time of a
step: `crowd`, for the share of processors that have a tile in the mean wave, because they share the
L2 cache; and `empty`, for a tile with more rows than M, because rows beyond M are not copied.

The numbers are in `tile_costs.py`. `kernels/bench/fit_products.py` computes them, with the same
functions on tensors.
"""

import functools
import math
from typing import NamedTuple

from rlk_kernels.matmul.tile import Tile


class TileCost(NamedTuple):
    """What one tile costs, in microseconds."""

    launch: float
    wave: float
    """The start of a wave and the write of its outputs."""
    step: float
    """Per 1000 of K."""
    crowd: float
    """The fraction by which a step is longer when all processors have a tile."""
    empty: float
    """The fraction of a step that remains when a tile has no rows."""
    megabyte: float
    narrow: float
    """`step` of the tiles of the tail."""


def costs_of(numbers: dict[tuple, tuple], **options: bool) -> dict[Tile, TileCost]:
    """{(m, n, k, warps, stages): the numbers of a `TileCost`} as costs of tiles with `options`."""
    make = functools.partial(Tile, **options)
    return {make(*shape): TileCost(*cost) for shape, cost in numbers.items()}


class Work(NamedTuple):
    """The work of a product with a tile."""

    waves: float
    share: float
    """The share of processors that have a tile in the mean wave."""
    narrow_waves: float
    k: float
    """In thousands."""
    filled: float
    """The share of a tile's rows that the product has."""
    megabytes: float


def work_of(tile: Tile, m: int, n: int, k: int, processors: int) -> Work:
    """The work of an [m, n] output over k, with 16-bit numbers."""
    wide = tile.wide_columns(m, n, processors)
    tiles = tile.count(m, wide)
    waves = -(-tiles // processors)
    narrow_waves = 0
    if tile.tail:
        narrow = -(-m // tile.m) * -(-(n - wide) // tile.tail)
        narrow_waves = -(-max(0, narrow - (waves * processors - tiles)) // processors)
    return Work(
        waves, tiles / (processors * waves) if waves else 0, narrow_waves, k / 1000,
        min(1, m / tile.m), 2 * (m * k + n * k + m * n) / 1e6,
    )  # fmt: skip


def microseconds(cost: TileCost, work: Work):
    """The predicted time of numbers, or of tensors elementwise."""
    shared = (1 + cost.crowd * work.share) * (cost.empty + (1 - cost.empty) * work.filled)
    arithmetic = work.waves * (cost.wave + cost.step * work.k * shared)
    arithmetic = arithmetic + work.narrow_waves * (cost.wave + cost.narrow * work.k)
    return cost.launch + (arithmetic**4 + (cost.megabyte * work.megabytes) ** 4) ** 0.25


Candidate = tuple[Tile, int, int, TileCost]
"""A tile, its rows and columns, and its numbers."""


def candidates(costs: dict[Tile, TileCost]) -> list[Candidate]:
    """`costs` as `fastest` reads them, with large tiles, which win most often, first."""
    tiles = sorted(costs, key=lambda tile: -tile.m * tile.n)
    return [(tile, tile.m, tile.n, costs[tile]) for tile in tiles]


def fastest(among: list[Candidate], m: int, n: int, k: int, processors: int) -> Tile:
    """The tile with the least `microseconds`, found in a quarter of the time that a call of
    `microseconds` for each tile takes. An engine has thousands of shapes, and its first call of
    each waits for this."""
    thousands, megabytes = k / 1000, 2 * (m * k + n * k + m * n) / 1e6
    least, best = math.inf, among[0][0]
    for tile, rows, columns, cost in among:
        launch, wave, step, crowd, empty, megabyte, _ = cost
        memory = megabyte * megabytes
        if launch + memory >= least:
            continue
        if tile.tail:
            # a tail without a full wave before it was not measured
            if m * n < rows * columns * processors:
                continue
            us = microseconds(cost, work_of(tile, m, n, k, processors))
        else:
            tiles = -(-m // rows) * -(-n // columns)
            waves = -(-tiles // processors)
            shared = 1 + crowd * tiles / (processors * waves)
            if m < rows:
                shared *= empty + (1 - empty) * m / rows
            arithmetic = waves * (wave + step * thousands * shared)
            if launch + arithmetic >= least:
                continue
            us = launch + (arithmetic**4 + memory**4) ** 0.25
        if us < least:
            least, best = us, tile
    return best
