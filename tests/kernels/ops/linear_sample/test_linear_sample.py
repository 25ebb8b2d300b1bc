"""linear_sample on the CPU: the portable backend, and Triton in its interpreter.

T = rows   V = vocabulary   H = hidden size
"""

import math

import pytest
import rlk_kernels as rk
import torch
from hidden_sample_suite import Case, case
from rlk_kernels.ops.linear_sample import kernels, portable
from sample_suite import of_requests, picked, same

LONG = pytest.mark.whole_matrix
"""In Triton's interpreter a row takes about half a second."""
SLOW = pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=LONG)])


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks of columns and of rows at the sizes of a test."""
    monkeypatch.setattr(kernels, "LOGITS_BYTES", 2048)
    monkeypatch.setattr(kernels, "ROWS", 2)
    monkeypatch.setattr(portable, "LOGITS", 1000)


def equals_two_steps(c: Case, backend: str) -> bool:
    got = c.fused(backend=backend)
    return bool((got.ids >= 0).all()) and same(got, c.in_two_steps(backend))


@pytest.mark.parametrize("logit_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_bits_of_sample_of_linear(dtype: torch.dtype, logit_dtype: torch.dtype) -> None:
    for t, h, v, padding in ((1, 16, 1, 0), (6, 40, 300, 44), (7, 33, 17, 1), (2, 900, 512, 0)):
        c = case(t, h, v, dtype, padding=padding, logit_dtype=logit_dtype)
        assert equals_two_steps(c, "torch"), (t, h, v)


SIZES = ((1, 16, 1, 0), (5, 40, 800, 44), (3, 33, 17, 1), (2, 1100, 512, 0))
INTERPRETED = (
    (torch.float16, torch.float32, (2, 16, 270, 20)),
    *(pytest.param(dtype, logits, sizes, marks=LONG)
      for dtype in (torch.float16, torch.float32) for logits in (torch.float32, torch.bfloat16)
      for sizes in SIZES),
)  # fmt: skip


@pytest.mark.parametrize(("dtype", "logit_dtype", "sizes"), INTERPRETED)
def test_the_bits_of_sample_of_linear_in_the_interpreter(dtype, logit_dtype, sizes) -> None:
    t, h, v, padding = sizes
    c = case(t, h, v, dtype, padding=padding, logit_dtype=logit_dtype)
    assert equals_two_steps(c, "triton")


@pytest.mark.parametrize("plant", ["another row's weight", "a chunk at the place of the first"])
def test_a_fault_of_a_chunk_is_noticed(plant: str, monkeypatch) -> None:
    """The control of the tests above."""
    c, product, launch = case(2, 8, 270, torch.float32), kernels.product, kernels.launch
    c.options["temperature"].fill_(1.0)

    def shifted(h, w, *rest):
        return product(h, w.roll(1, 0), *rest)

    def misplaced(cache, kernel, grid, arguments, *rest):
        if kernel is kernels._draw_blocks_kernel:
            arguments = (*arguments[:11], 0, *arguments[12:])
        launch(cache, kernel, grid, arguments, *rest)

    if plant == "another row's weight":
        monkeypatch.setattr(kernels, "product", shifted)
    else:
        monkeypatch.setattr(kernels, "launch", misplaced)
    assert not same(c.fused(backend="triton"), c.in_two_steps("triton"))


def test_a_row_has_the_bits_that_it_has_alone(backend: str) -> None:
    """In another order, and with strided hidden states."""
    c = case(3, 24, 40, torch.float32, padding=5)
    whole, order = c.fused(backend=backend), torch.tensor([2, 0, 1])
    assert same(c.rows(order).fused(backend=backend), picked(whole, order))
    wide = torch.full((3, 31), math.nan)
    wide[:, :24] = c.hidden
    strided = Case(wide[:, :24], c.weight, c.keys, c.positions, c.options)
    assert same(strided.rows(slice(1, 2)).fused(backend=backend), picked(whole, slice(1, 2)))


@SLOW
def test_chunks_change_no_bit(monkeypatch, backend: str) -> None:
    c = case(3, 16, 300, torch.float32)
    whole = c.fused(backend=backend)
    monkeypatch.setattr(kernels, "LOGITS_BYTES", 1 << 20)
    monkeypatch.setattr(kernels, "ROWS", 1024)
    monkeypatch.setattr(portable, "LOGITS", 1 << 20)
    assert same(c.fused(backend=backend), whole)


@SLOW
def test_the_log_probs_are_those_of_linear_logp(backend: str) -> None:
    c = case(3, 24, 300, torch.float32)
    c.options["temperature"].fill_(1.0)
    got = c.fused(backend=backend)
    expected = rk.linear_logp(c.hidden, c.weight, got.ids, backend=backend)
    assert torch.equal(got.logprobs, expected)
    assert torch.equal(got.raw_logprobs, expected)
    assert bool((got.mass == 1).all())
    assert got.kept.tolist() == [300] * 3


def test_temperature_zero_takes_the_first_of_the_largest(backend: str) -> None:
    c = case(2, 16, 600, torch.float32)
    largest = int((c.hidden[0] @ c.weight.mT).argmax())
    c.weight[largest] *= 2
    c.weight[[255, 300, 599]] = c.weight[largest].clone()
    first = min(largest, 255)
    got = c.rows([0]).fused(backend=backend)
    assert got.ids.tolist() == [first]
    assert got.logprobs.tolist() == [0.0]
    assert got.kept.tolist() == [1]
    assert bool(got.raw_logprobs < -1.0)


@SLOW
def test_columns_at_minus_infinity_are_never_drawn(backend: str) -> None:
    """Whole blocks of a padded vocabulary; 300 of 600 columns are tokens."""
    c = case(3, 16, 600, torch.float32, padding=300)
    got = c.fused(backend=backend)
    assert bool((got.ids < 300).all())
    assert bool((c.options["bias"][got.ids] > -math.inf).all())
    assert got.kept[1:].tolist() == [int((c.options["bias"] > -math.inf).sum())] * 2


@pytest.mark.parametrize(
    "bad", [math.nan, *(pytest.param(bad, marks=LONG) for bad in (math.inf, "nothing"))]
)
def test_a_row_without_a_distribution(bad: float | str, backend: str) -> None:
    c = case(4, 16, 40, torch.float32)
    good = c.fused(backend=backend)
    if bad == "nothing":
        c.options["bias"] = torch.full((40,), -math.inf)
        first = 0
    else:
        c.hidden[1::2] = bad
        first = 1
    if backend == "torch":
        error = f"linear_sample: row {first} of the logits has no distribution"
        with pytest.raises(ValueError, match=error):
            c.fused(backend=backend)
        return
    got = c.fused(backend=backend)
    assert got.ids[first::2].tolist() == [-1, -1]
    assert got.kept[first::2].tolist() == [0, 0]
    assert bool(got.logprobs[first::2].isnan().all())
    assert bool(got.raw_logprobs[first::2].isnan().all())
    if first:
        assert same(picked(got, [0, 2]), picked(good, [0, 2]))


def test_an_error_has_the_number_of_the_row_in_the_batch() -> None:
    c = case(60, 16, 40, torch.float32)
    c.hidden[57, 3] = math.nan
    with pytest.raises(ValueError, match="linear_sample: row 57"):
        c.fused(backend="torch")


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("rows", [1, 16, 64, 256, 1024])
def test_chunks_are_whole_blocks_within_their_bytes(rows: int, itemsize: int, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "LOGITS_BYTES", 16 << 20)
    for v in (1, 4095, 4096, 4097, 32_000, 151_936):
        columns = kernels.chunk_columns(rows, v, 4096, itemsize)
        assert columns % 4096 == 0
        assert columns - 4096 < v
        assert rows * columns * itemsize <= 16 << 20


def test_refusals() -> None:
    x, w, where = torch.ones(2, 8), torch.ones(5, 8), of_requests(2)
    with pytest.raises(rk.UnsupportedShape, match=r"hidden\[T, H\] and weight\[V, H\]"):
        rk.linear_sample(x, w[:, :7], *where)
    with pytest.raises(rk.UnsupportedShape, match="1 <= V"):
        rk.linear_sample(x, w[:0], *where)
    with pytest.raises(rk.UnsupportedShape, match="bias"):
        rk.linear_sample(x, w, *where, bias=torch.ones(4))
    with pytest.raises(rk.UnsupportedShape, match="linear_sample: keys"):
        rk.linear_sample(x, w, where[0][:1], where[1])
    with pytest.raises(rk.UnsupportedShape, match="linear_sample: temperature"):
        rk.linear_sample(x, w, *where, temperature=torch.ones(3))
    with pytest.raises(rk.UnsupportedDtype, match="linear_sample: positions"):
        rk.linear_sample(x, w, where[0], where[1].float())
    with pytest.raises(rk.UnsupportedDtype, match="cast one"):
        rk.linear_sample(x, w.half(), *where)
    with pytest.raises(rk.UnsupportedDtype, match="no fixed order"):
        rk.linear_sample(x.double(), w.double(), *where)
    with pytest.raises(rk.UnsupportedDtype, match="logit_dtype"):
        rk.linear_sample(x, w, *where, logit_dtype=torch.float64)
    with pytest.raises(ValueError, match="temperature must be from 0"):
        rk.linear_sample(x, w, *where, temperature=-1.0)
    with pytest.raises(TypeError, match="top_k"):
        rk.linear_sample(x, w, *where, top_k=5)


def test_a_gradient_is_refused_by_name(backend: str) -> None:
    x, w = torch.ones(2, 8, requires_grad=True), torch.ones(5, 8)
    drawn = rk.linear_sample(x, w, *of_requests(2), backend=backend)
    with pytest.raises(NotImplementedError, match="linear_sample: a choice has no gradient"):
        drawn.logprobs.sum().backward()
