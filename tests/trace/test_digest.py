"""Digests and statistics of rows, compared with arithmetic on Python's integers and floats."""

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlk_align.trace import digest
from rlk_align.trace.digest import (
    digest_parameter,
    digest_parameters,
    digest_rows,
    digest_slices,
    row_statistics,
)

torch.set_num_threads(1)
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
WIDTHS = [1, 3, 63, 257]
M64 = 2**64


def digest_in_words(data: bytes) -> tuple[int, int]:
    """The formula of the module's docstring on unbounded integers modulo 2^64."""
    data += bytes(-len(data) % 8)
    lanes = [v for (v,) in struct.iter_unpack("<Q", data)]
    table = digest._coefficients(len(lanes), torch.device("cpu")).tolist()
    a, b, c = ([v % M64 for v in row] for row in table)
    first = second = 0
    for j, x in enumerate(lanes):
        y = (x + 1) * a[j] % M64
        z = y ^ (y >> 32)
        first += z * b[j]
        second += z * c[j]
    return first % M64, second % M64


def unsigned(digests: torch.Tensor) -> list[tuple[int, int]]:
    return [(a % M64, b % M64) for a, b in digests.tolist()]


def raw(row: torch.Tensor) -> bytes:
    return row.contiguous().view(torch.uint8).numpy().tobytes()


def random_rows(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_digest_is_the_formula(dtype: torch.dtype, width: int) -> None:
    rows = random_rows(5, width, dtype)
    rows[1, 0], rows[2, -1], rows[3, 0], rows[4] = math.nan, math.inf, -0.0, 0.0
    digests = digest_rows(rows)
    assert digests.dtype == torch.int64
    assert unsigned(digests) == [digest_in_words(raw(row)) for row in rows]


@given(st.binary(min_size=1, max_size=70))
def test_a_digest_is_the_formula_for_any_bytes(data: bytes) -> None:
    row = torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(1, -1)
    assert unsigned(digest_rows(row)) == [digest_in_words(data)]


def test_coefficients_are_odd_and_the_same_everywhere() -> None:
    # Pinned, because traces of other machines and versions are compared by them.
    table = digest._coefficients(3, torch.device("cpu"))
    assert bool((table & 1).all())
    assert len(set(table.flatten().tolist())) == 9
    # A row's digest may not depend on how many lanes others have.
    longer = digest._coefficients(50, torch.device("cpu"))
    assert torch.equal(longer[:, :3], table)
    rows = torch.arange(12, dtype=torch.float32).reshape(2, 6)
    assert digest_rows(rows).tolist() == PINNED


PINNED = [
    [4452375383502847585, -4162624121917521907],
    [1372321983123639579, 2491789886000471851],
]


@pytest.mark.parametrize("width", WIDTHS)
def test_every_single_bit_counts(width: int) -> None:
    row = random_rows(1, width, torch.bfloat16)
    data = bytearray(raw(row))
    flipped = []
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        flipped.append(bytes(data))
        data[bit // 8] ^= 1 << bit % 8
    rows = torch.frombuffer(bytearray(b"".join(flipped)), dtype=torch.bfloat16).reshape(-1, width)
    digests = unsigned(digest_rows(rows))
    original = unsigned(digest_rows(row))[0]
    # Each of the two 64-bit sums changes, and no two flips have equal digests.
    assert all(a != original[0] and b != original[1] for a, b in digests)
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_sign_flips_do_not_cancel(dtype: torch.dtype) -> None:
    row = random_rows(1, 40, dtype)
    rows = []
    for i in range(40):
        for j in range(i):
            other = row[0].clone()
            other[[i, j]] = -other[[i, j]]
            rows.append(other)
    first, second = zip(*unsigned(digest_rows(torch.stack(rows))), strict=True)
    original = unsigned(digest_rows(row))[0]
    assert original[0] not in first
    assert original[1] not in second
    assert len(set(first)) == len(first)


@given(st.data())
def test_the_order_of_values_counts(data: st.DataObject) -> None:
    row = list(range(1, 20))
    other = data.draw(st.permutations(row))
    digests = unsigned(digest_rows(torch.tensor([row, other], dtype=torch.float32)))
    assert (digests[0] == digests[1]) == (row == other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_does_not_depend_on_its_batch(
    dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = random_rows(23, width, dtype)
    together, statistics = digest_rows(rows), row_statistics(rows)
    assert torch.equal(together, torch.cat([digest_rows(row[None]) for row in rows]))
    for block in (1, width, 5 * width + 1):
        monkeypatch.setattr(digest, "_block", lambda _device, block=block: block)
        assert torch.equal(digest_rows(rows), together)
        torch.testing.assert_close(row_statistics(rows), statistics, rtol=1e-14, atol=0)


def test_a_row_does_not_depend_on_its_layout() -> None:
    rows = random_rows(7, 9, torch.float32)
    wanted = digest_rows(rows)
    assert torch.equal(digest_rows(rows.T.contiguous().T), wanted)
    wide = torch.zeros(7, 20)
    wide[:, 4:13] = rows
    assert torch.equal(digest_rows(wide[:, 4:13]), wanted)
    single = rows[:, :1].clone()
    # One strided feature: a column of a transposed matrix.
    assert torch.equal(digest_rows(rows.T.contiguous().T[:, :1]), digest_rows(single))


def test_no_rows_have_no_digests() -> None:
    assert digest_rows(torch.zeros(0, 5)).shape == (0, 2)
    assert row_statistics(torch.zeros(0, 5)).shape == (0, 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_of_either_sign_differ(dtype: torch.dtype) -> None:
    digests = digest_rows(torch.tensor([[0.0], [-0.0]], dtype=dtype))
    assert not torch.equal(digests[0], digests[1])


def test_nans_differ_by_their_pattern() -> None:
    patterns = torch.tensor([[0x7FC0], [0x7FC1], [0x7F81], [-0x40]], dtype=torch.int16)
    rows = patterns.view(torch.bfloat16)
    assert bool(rows.isnan().all())
    assert len(set(unsigned(digest_rows(rows)))) == 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_statistics_are_those_of_float64(dtype: torch.dtype, width: int) -> None:
    rows = random_rows(6, width, dtype)
    rows[1, 0] = math.nan
    rows[2, 0], rows[2, -1] = math.inf, -math.inf
    rows[3] = math.nan
    rows[4] = -0.0
    statistics = row_statistics(rows).numpy()
    for row, (norm, absmax, nonfinite) in zip(rows.double().numpy(), statistics, strict=True):
        finite = row[np.isfinite(row)]
        assert nonfinite == width - len(finite)
        assert absmax == (np.abs(finite).max() if len(finite) else 0.0)
        truth = math.sqrt(math.fsum(float(v) ** 2 for v in finite))
        assert norm == pytest.approx(truth, rel=1e-14, abs=0)


def test_statistics_survive_large_values() -> None:
    # The square of bf16's largest number overflows float32.
    rows = torch.full((1, 3), 3e38, dtype=torch.bfloat16)
    truth = float(rows[0, 0].double()) * math.sqrt(3)
    assert row_statistics(rows)[0, 0].item() == pytest.approx(truth, rel=1e-12)


def test_a_parameter_is_its_values_in_any_dtype() -> None:
    weight = random_rows(17, 33, torch.bfloat16)
    digests = {digest_parameter(weight.to(t)) for t in (torch.bfloat16, torch.float32)}
    assert len(digests) == 1
    half = random_rows(17, 33, torch.float16)
    assert digest_parameter(half) == digest_parameter(half.float())
    text = digest_parameter(weight)
    assert len(text) == 32
    assert int(text, 16) >= 0


def test_a_parameter_has_no_sign_of_zero() -> None:
    weight = random_rows(4, 4, torch.bfloat16)
    weight[1, 2] = 0.0
    other = weight.clone()
    other[1, 2] = -0.0
    assert digest_parameter(weight) == digest_parameter(other)
    assert digest_parameter(torch.zeros(3)) == digest_parameter(-torch.zeros(3))


def test_a_parameter_is_not_modified() -> None:
    weight = torch.tensor([[-0.0, 1.0]])
    digest_parameter(weight)
    assert torch.signbit(weight[0, 0])


def test_a_parameter_is_digested_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_rows(12, 7, torch.bfloat16)
    whole = digest_parameter(weight)
    monkeypatch.setattr(digest, "_block", lambda _device: 35)
    assert digest_parameter(weight) == whole


def test_parameters_digested_together_are_those_digested_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = [(12, 7), (5,), (12, 7), (7, 12), (12, 7), (5,), (2, 3, 4)]
    named = [
        (f"{i}", random_rows(1, math.prod(s), torch.float32, i).reshape(s))
        for i, s in enumerate(shapes)
    ]
    named.append(("7", named[0][1].bfloat16()))
    alone = [(name, digest_parameter(weight)) for name, weight in named]
    assert len({value for _, value in alone}) == len(alone)
    for most in (1 << 27, 170, 1):
        monkeypatch.setattr(digest, "_STACKED", most)
        assert list(digest_parameters(named).items()) == alone
    assert digest_parameters([]) == {}


def test_a_parameters_shape_counts() -> None:
    weight = random_rows(1, 24, torch.float32)
    shapes = [(24,), (1, 24), (24, 1), (4, 6), (6, 4), (2, 3, 4), (1, 1, 24)]
    assert len({digest_parameter(weight.reshape(s)) for s in shapes}) == len(shapes)


@given(st.integers(0, 11), st.integers(0, 6))
def test_each_element_of_a_parameter_counts(row: int, column: int) -> None:
    weight = random_rows(12, 7, torch.bfloat16)
    other = weight.clone()
    bits = other.view(torch.int16)
    bits[row, column] ^= 1
    assert digest_parameter(other) != digest_parameter(weight)


def test_swapped_rows_of_a_parameter_count() -> None:
    weight = random_rows(12, 7, torch.bfloat16)
    assert digest_parameter(weight[torch.arange(11, -1, -1)]) != digest_parameter(weight)


def test_a_scalar_parameter_has_a_digest() -> None:
    assert digest_parameter(torch.tensor(1.5)) != digest_parameter(torch.tensor(2.5))


def test_slices_of_a_parameter_have_digests_of_their_own() -> None:
    weight = torch.randn(37, 21)
    rows, columns = digest_slices(weight)
    assert rows.shape == (37,)
    assert columns.shape == (21,)
    other = weight.clone()
    other[5, 3] += 1
    changed = digest_slices(other)
    assert np.flatnonzero(changed[0] != rows).tolist() == [5]
    assert np.flatnonzero(changed[1] != columns).tolist() == [3]
    order = torch.randperm(37)
    assert np.array_equal(digest_slices(weight[order])[0], rows[order.numpy()])
    across = torch.randperm(21)
    assert np.array_equal(digest_slices(weight[:, across])[1], columns[across.numpy()])


def test_slices_do_not_depend_on_the_dtype_or_on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(33, 18).bfloat16()
    weight[0, 0] = -0.0
    whole = digest_slices(weight)
    monkeypatch.setattr(digest, "_block", lambda _device: 40)
    for again in (digest_slices(weight), digest_slices(weight.float())):
        assert np.array_equal(again[0], whole[0])
        assert np.array_equal(again[1], whole[1])
    weight[0, 0] = 0.0
    assert np.array_equal(digest_slices(weight)[1], whole[1])


def test_slices_of_a_vector_are_its_elements() -> None:
    rows, columns = digest_slices(torch.tensor([1.0, 2.0, 1.0]))
    assert rows[0] == rows[2] != rows[1]
    assert columns.shape == (0,)
