"""The tiles of each program where two products share a launch of `accumulate.py`, as `SharedLaunch`
of `matmul/accumulate/plan.py` divides them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rlk_kernels.matmul.accumulate import plan

COLUMNS = gl.constexpr(plan.COLUMNS)
STEP = gl.constexpr(plan.STEP)
"""The step of K."""


@gluon.jit
def tile_count(tiles, all_tiles, heavy):
    """(tiles of `all_tiles`, tiles in total) of this program. It has one in num_programs of
    `all_tiles`; programs from the `heavy`-th on have one in num_programs - heavy of the rest."""
    pid = gl.program_id(0)
    even = gl.cdiv(gl.maximum(all_tiles - pid, 0), gl.num_programs(0))
    light = gl.maximum(gl.num_programs(0) - heavy, 1)
    more = gl.cdiv(gl.maximum(tiles - all_tiles - (pid - heavy), 0), light)
    return even, gl.where(pid < heavy, even, even + more)


@gluon.jit
def nth_tile(j, even, all_tiles, heavy):
    """The j-th tile of this program."""
    pid = gl.program_id(0)
    rest = all_tiles + pid - heavy + (j - even) * (gl.num_programs(0) - heavy)
    return gl.where(j < even, pid + j * gl.num_programs(0), rest)
