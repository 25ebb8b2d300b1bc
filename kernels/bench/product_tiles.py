"""Tiles that `linear` could take: `tune_products.py` times them, `fit_products.py` chooses."""

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
SHARED = 226 << 10  # bytes of shared memory that the buffers of a tile may take


def _apart(groups: int, flat: int, *, swap: bool = False, registers: bool = False) -> Tile:
    """Copies and products apart: 64 x groups by flat, with all the buffers that fit."""
    tall = 64 * groups
    k = 128 if tall + flat <= 208 and not registers else 64
    stages = min(8, SHARED // ((tall + flat) * k * 2))
    width, n2, n3 = [*_widths(flat), 0, 0][:3]
    m, n = (width, tall) if swap else (tall, width)
    return Tile(
        m, n, k, 4, stages, n2=n2, n3=n3, swap=swap, registers=registers, warp_specialized=True
    )


def _widths(flat: int) -> list[int]:
    """Widths of products that make up `flat`."""
    return [1 << i for i in range(8, 2, -1) if flat & 1 << i]


SPILLING = {(3, 128), (4, 64), (4, 128)}
"""(groups, rows) of tiles whose fp32 outputs would not fit the registers."""


def _worth(groups: int, flat: int, swap: bool, registers: bool) -> bool:
    """Registers pay with several widths and two other groups (3 ... 9 % of the time; with one other
    they cost 2 ... 15 %), and several narrow widths pay with registers only."""
    count = len(_widths(flat))
    if registers:
        return groups == 3 and count > 1
    if swap and (groups, flat) in SPILLING:
        return False
    return flat in (72, 80, 96, 144, 160, 192, 208, 224) or groups == 1 or count == 1


WIDTHS = {1: (96, 256), 2: (64, 256), 3: (64, 208), 4: (64, 160)}
"""Groups -> columns of a tile, from ... to, by 16."""
HEIGHTS = {1: (16, 144), 2: (16, 224), 3: (48, 208), 4: (64, 144)}
"""Groups -> rows of a tile whose columns are the groups', from ... to, by 8."""
APART = [
    _apart(groups, flat, swap=swap, registers=registers)
    for swap, sides in ((False, WIDTHS), (True, HEIGHTS))
    for groups, (least, most) in sides.items()
    for flat in range(least, most + 1, 8 if swap else 16)
    for registers in (False, True)
    if len(_widths(flat)) <= 3 and _worth(groups, flat, swap, registers)
]
CANDIDATES = [*PLAIN, *APART]
