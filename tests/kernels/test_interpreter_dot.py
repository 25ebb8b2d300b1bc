"""What is changed of Triton's interpreter: whole numbers that do not fit are noticed, and
slices are reduced at once."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

MOST, LEAST = 2**31 - 1, -(2**31)


@triton.jit
def _whole_numbers_kernel(x_ptr, y_ptr, out_ptr, OP: tl.constexpr):
    i = tl.arange(0, 2)
    x = tl.load(x_ptr + i)
    y = tl.load(y_ptr + i)
    z = x + y if OP == "add" else x - y if OP == "sub" else x * y
    tl.store(out_ptr + i, z)


def computed(op: str, x: list[int], y: list[int], dtype: torch.dtype) -> list[int]:
    out = torch.zeros(2, dtype=dtype)
    x_in, y_in = torch.tensor(x, dtype=dtype), torch.tensor(y, dtype=dtype)
    _whole_numbers_kernel[(1,)](x_in, y_in, out, op)
    return out.tolist()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_what_fits_is_computed(dtype: torch.dtype) -> None:
    assert computed("add", [MOST, -1], [0, LEAST + 1], dtype) == [MOST, LEAST]
    assert computed("sub", [MOST, -1], [0, MOST], dtype) == [MOST, LEAST]
    assert computed("mul", [MOST, 1 << 16], [-1, -(1 << 15)], dtype) == [-MOST, LEAST]


@pytest.mark.parametrize(
    ("op", "x", "y"),
    [("add", MOST, 1), ("add", LEAST, -1), ("sub", LEAST, 1), ("mul", 1 << 16, 1 << 15)],
)
def test_what_does_not_fit_is_noticed(op: str, x: int, y: int) -> None:
    """As indices into large tensors do not fit: on a GPU they wrap, and say nothing."""
    with pytest.raises(Exception, match=f"int32 overflow detected for operation {op}"):
        computed(op, [1, x], [1, y], torch.int32)
    exact = {"add": x + y, "sub": x - y, "mul": x * y}[op]
    assert computed(op, [1, x], [1, y], torch.int64)[1] == exact


@triton.jit
def _half_and(a, b):
    return a * 0.5 + b


@triton.jit
def _reduce_kernel(x_ptr, out_ptr):
    rows, columns = tl.arange(0, 4), tl.arange(0, 8)
    x = tl.load(x_ptr + 8 * rows[:, None] + columns[None, :])
    tl.store(out_ptr + rows, tl.reduce(x, 1, _half_and))


def test_slices_are_combined_front_to_back_and_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply, products = InterpreterBuilder.create_fmul, []

    def counted(builder, a, b):
        products.append(a.data.shape)
        return multiply(builder, a, b)

    monkeypatch.setattr(InterpreterBuilder, "create_fmul", counted)
    x, out = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)), torch.zeros(4)
    _reduce_kernel[(1,)](x, out)
    total = x[:, 0]
    for column in range(1, 8):
        total = total * 0.5 + x[:, column]
    assert out.equal(total)
    assert products == [(4,)] * 7
