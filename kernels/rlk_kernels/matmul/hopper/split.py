"""`matmul/split.py` for the kernels written for Hopper: two high parts lie in one register.

Written in Gluon, which ships with Triton.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _lower(x):
    return (x << 16).to(gl.float32, bitcast=True)


@gluon.jit
def _upper(x):
    return (x & 0xFFFF0000).to(gl.float32, bitcast=True)


@gluon.jit
def _halves(x):
    """The left and the right columns of x[R, C]."""
    return gl.split(gl.permute(gl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@gluon.jit
def _joined(left, right, like):
    """`_halves` undone, as `like` lies in registers."""
    layout: gl.constexpr = like.type.layout
    x = gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), like.shape)
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def no_high(x):
    """uint32[R, C / 2]: the high parts of x[R, C] before its second segment."""
    left, _ = _halves(x)
    return gl.zeros_like(left).to(gl.uint32, bitcast=True)


@gluon.jit
def whole_sum(rest, high, SPLIT: gl.constexpr):
    """The sums: `rest`, and where they were split the high parts too."""
    if SPLIT:
        left, right = _halves(rest)
        rest = _joined(left + _lower(high), right + _upper(high), rest)
    return rest


@gluon.jit
def carry_high(rest, high, FIRST: gl.constexpr):
    """`steps.carry_high`, the high parts of two numbers in one of `high`; FIRST: there are none."""
    left, right = _halves(rest)
    if not FIRST:
        left = left + _lower(high)
        right = right + _upper(high)
    high = gl.inline_asm_elementwise(  # not pure: packed here, or both words live through a segment
        "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r",
        [left.to(gl.uint32, bitcast=True), right.to(gl.uint32, bitcast=True)],
        dtype=gl.uint32, is_pure=False, pack=1,
    )  # fmt: skip
    return _joined(left - _lower(high), right - _upper(high), rest), high
