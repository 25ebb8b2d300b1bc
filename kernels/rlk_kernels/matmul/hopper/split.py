"""Split accumulation (`matmul/split.py`) in Gluon for Hopper, with two high parts in a register."""

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
    """The inverse of `_halves`, in the layout of `like`."""
    layout: gl.constexpr = like.type.layout
    x = gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), like.shape)
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def no_high(x):
    """uint32[R, C / 2]: the zero high parts of x[R, C] before its second segment."""
    left, _ = _halves(x)
    return gl.zeros_like(left).to(gl.uint32, bitcast=True)


@gluon.jit
def whole_sum(rest, high, SPLIT: gl.constexpr):
    """The sums: `rest`, plus the high parts where accumulation is split."""
    if SPLIT:
        left, right = _halves(rest)
        rest = _joined(left + _lower(high), right + _upper(high), rest)
    return rest


@gluon.jit
def carry_high(rest, high, FIRST: gl.constexpr):
    """`steps.carry_high` with the high parts of two numbers in one element of `high`; FIRST: there
    are no high parts yet."""
    left, right = _halves(rest)
    if not FIRST:
        left = left + _lower(high)
        right = right + _upper(high)
    # not pure: packed later, both words would be live through a segment
    high = gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r",
        [left.to(gl.uint32, bitcast=True), right.to(gl.uint32, bitcast=True)],
        dtype=gl.uint32, is_pure=False, pack=1,
    )  # fmt: skip
    return _joined(left - _lower(high), right - _upper(high), rest), high
