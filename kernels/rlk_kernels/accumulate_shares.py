"""Which program makes which tiles, where two products share a launch of `accumulate_hopper.py`.

Programs that have fewer tiles of the one take more of the other, so that all end together. Where
the first has unfinished sums, half of the programs begin with the second: that traffic runs beside
products that have none. Tiles of the second may be half as wide.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rlk_kernels.accumulate_triton import Sum
from rlk_kernels.hopper import ROWS

COLUMNS = gl.constexpr(256)
STEP = gl.constexpr(64)
"""Of K."""


@gluon.jit
def count_of(tiles, all_tiles, heavy):
    """Tiles of this program: of `all_tiles` one in num_programs, of the rest (those from the
    `heavy`-th program on) one in num_programs - heavy."""
    pid = gl.program_id(0)
    own = gl.cdiv(gl.maximum(all_tiles - pid, 0), gl.num_programs(0))
    light = gl.maximum(gl.num_programs(0) - heavy, 1)
    more = gl.cdiv(gl.maximum(tiles - all_tiles - (pid - heavy), 0), light)
    return own, gl.where(pid < heavy, own, own + more)


@gluon.jit
def nth(j, own, all_tiles, heavy):
    """The j-th tile of this program."""
    pid = gl.program_id(0)
    rest = all_tiles + pid - heavy + (j - own) * (gl.num_programs(0) - heavy)
    return gl.where(j < own, pid + j * gl.num_programs(0), rest)


def tiles_of(piece: Sum, width: int) -> int:
    """Tiles of the output, `width` columns wide."""
    m, n = piece.out.shape
    return triton.cdiv(m, 2 * ROWS.value) * triton.cdiv(n, width)


def cost(piece: Sum, width: int) -> int:
    """What a tile of this width takes (time only); beside its products about four steps."""
    return (triton.cdiv(piece.b.shape[0], STEP.value) + 4) * width


def width_beside(piece: Sum, other: Sum, processors: int) -> int:
    """The width of `piece`'s tiles for a launch beside `other`; 0: better apart.

    A tile of `piece` must not last longer than the whole launch, and only sums that come whole, of
    the larger K, can have tiles half as wide.
    """
    if not (piece.first and piece.last) or piece.b.shape[0] < other.b.shape[0]:
        return 0
    beside = tiles_of(other, COLUMNS.value) * cost(other, COLUMNS.value)
    for width in (COLUMNS.value, COLUMNS.value // 2):
        tiles, each = tiles_of(piece, width), cost(piece, width)
        if triton.cdiv(tiles, processors) * each * processors <= beside + tiles * each:
            return width
    return 0


def shares(tiles: int, each: int, other: int, other_each: int, programs: int) -> tuple[int, int]:
    """(tiles that all programs share, `heavy`): the first `heavy` programs have one tile more of
    the other product, and the others take the rest of this one."""
    heavy = other % programs
    light = programs - heavy
    rest = min(other_each // each, tiles // light) * light if heavy else 0
    return tiles - rest, heavy
