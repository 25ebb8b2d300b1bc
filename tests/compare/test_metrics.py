"""Every metric against arithmetic done otherwise: Python floats, bit patterns, brute force."""

import math
import struct
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlk_align.compare.metrics import ValueMetrics, _ordered_bits, edge_metrics, error_frontier
from rlk_align.judge.checks import tolerance_ratio
from rlk_align.results import EdgeMetrics

torch.set_num_threads(1)

FLOATS = [n for n, f in EdgeMetrics.model_fields.items() if f.annotation is float]
logprobs = st.lists(
    st.tuples(st.floats(-30, 0, width=32), st.floats(-30, 0, width=32)), min_size=1, max_size=40
)


def quantile(values: list[float], q: float) -> float:
    """Linear between the order statistics, as numpy's default and R's type 7."""
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def float32_bits(x: float) -> bytes:
    return struct.pack("<f", x)


@given(logprobs)
def test_edge_metrics_are_their_formulas(pairs: list[tuple[float, float]]) -> None:
    a, b = (np.array(side, dtype=np.float32) for side in zip(*pairs, strict=True))
    metrics = edge_metrics(a, b)
    delta = [float(y) - float(x) for x, y in zip(a, b, strict=True)]
    ratio = [math.exp(d) for d in delta]
    n = len(delta)
    near = {"rel": 1e-12, "abs": 1e-15}
    assert metrics.tokens == n
    assert metrics.bit_mismatches == sum(float32_bits(x) != float32_bits(y) for x, y in pairs)
    assert metrics.max_abs_dlogp == max(map(abs, delta))
    assert metrics.mean_abs_dlogp == pytest.approx(math.fsum(map(abs, delta)) / n, **near)
    sizes = [abs(d) for d in delta]
    assert metrics.p99_abs_dlogp == pytest.approx(quantile(sizes, 0.99), **near)
    assert metrics.p999_abs_dlogp == pytest.approx(quantile(sizes, 0.999), **near)
    assert metrics.k1 == pytest.approx(-math.fsum(delta) / n, **near)
    k3 = math.fsum(math.expm1(d) - d for d in delta) / n
    assert metrics.k3 == pytest.approx(k3, **near)
    assert metrics.ratio_mean == pytest.approx(math.fsum(ratio) / n, **near)
    assert metrics.ratio_max == pytest.approx(max(ratio), **near)
    outside = sum(not 0.8 <= r <= 1.2 for r in ratio)
    assert metrics.clip_fraction == pytest.approx(outside / n, **near)
    squares = math.fsum(r * r for r in ratio)
    assert metrics.ess_fraction == pytest.approx(math.fsum(ratio) ** 2 / (n * squares), **near)
    multiplied = math.fsum(math.exp(s) for s in sizes) / n
    assert metrics.token_mult_prob_error == pytest.approx(multiplied, **near)
    assert metrics.ratio_mean_error == abs(metrics.ratio_mean - 1)


def test_delta_is_second_minus_first_and_widened_first() -> None:
    a, b = np.float32([-1.0]), np.float32([-1.0000001])
    metrics = edge_metrics(a, b)
    assert metrics.max_abs_dlogp == 2.0**-23
    assert metrics.k1 == 2.0**-23
    # In float32, exp rounds to 1; the ratio is wanted in float64.
    assert 0 < 1 - metrics.ratio_mean < 2e-7
    assert metrics.k3 == pytest.approx(2.0**-47, rel=1e-6, abs=0)


def test_k3_of_a_tiny_difference_keeps_its_digits() -> None:
    # exp(d) - 1 - d loses all of them; float64 log-probs stand for a long mean.
    metrics = edge_metrics(np.array([-1e-9]), np.array([0.0]))
    assert metrics.k3 == pytest.approx(0.5e-18, rel=1e-5, abs=0)


@given(logprobs)
def test_k3_is_never_negative(pairs: list[tuple[float, float]]) -> None:
    a, b = (np.array(side, dtype=np.float32) for side in zip(*pairs, strict=True))
    assert edge_metrics(a, b).k3 >= 0


@pytest.mark.parametrize(
    ("ratio", "clipped"),
    [(0.79, True), (0.81, False), (1.0, False), (1.19, False), (1.21, True), (1.25, True)],
)
def test_ratios_outside_a_fifth_are_clipped(ratio: float, clipped: bool) -> None:
    a = np.array([-1.0, -1.0])
    b = np.array([-1.0, -1.0 + math.log(ratio)])
    assert edge_metrics(a, b).clip_fraction == (0.5 if clipped else 0.0)


def test_equal_sides_are_exactly_zero() -> None:
    a = -np.abs(np.random.default_rng(0).normal(size=101)).astype(np.float32)
    metrics = edge_metrics(a, a.copy())
    zero = {n for n in FLOATS if getattr(metrics, n) == 0}
    assert zero == {*FLOATS} - {
        "ratio_mean",
        "ratio_max",
        "ess_fraction",
        "token_mult_prob_error",
    }
    assert (metrics.ratio_mean, metrics.ratio_max) == (1.0, 1.0)
    assert (metrics.ess_fraction, metrics.token_mult_prob_error) == (1.0, 1.0)
    assert metrics.ratio_mean_error == 0.0


def test_nothing_is_nan_everywhere() -> None:
    metrics = edge_metrics(np.zeros(0), np.zeros(0))
    assert metrics.tokens == 0
    assert all(math.isnan(getattr(metrics, n)) for n in FLOATS)
    assert math.isnan(metrics.ratio_mean_error)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_nan_and_inf_are_not_averaged_away(bad: float, side: int) -> None:
    pair = [np.full(1000, -1.0, dtype=np.float32), np.full(1000, -1.0, dtype=np.float32)]
    pair[side][500] = bad
    metrics = edge_metrics(*pair)
    for name in ("max_abs_dlogp", "mean_abs_dlogp", "k1", "k3", "token_mult_prob_error"):
        assert not math.isfinite(getattr(metrics, name)), name
    assert metrics.clip_fraction == 1e-3
    if math.isnan(bad):
        for name in ("p99_abs_dlogp", "p999_abs_dlogp", "ratio_mean", "ratio_max", "ess_fraction"):
            assert math.isnan(getattr(metrics, name)), name


def test_two_infinities_are_not_equal_log_probs() -> None:
    a = np.float32([-1.0, -math.inf])
    with warnings.catch_warnings():
        # It is a result, so no warning from below belongs on the user's terminal.
        warnings.simplefilter("error")
        metrics = edge_metrics(a, a)
    assert math.isnan(metrics.max_abs_dlogp)
    assert math.isnan(metrics.mean_abs_dlogp)


def metrics_of(
    a: torch.Tensor, b: torch.Tensor, introduced: torch.Tensor | None = None
) -> ValueMetrics:
    metrics = ValueMetrics()
    norms = [torch.linalg.vector_norm(t.double(), dim=1) for t in (a, b)]
    mask = torch.ones(len(a), dtype=torch.bool) if introduced is None else introduced
    metrics.add(a, b, *norms, mask)
    return metrics


DTYPES = [torch.bfloat16, torch.float16, torch.float32]
_PACK = {torch.float16: ("<e", "<H"), torch.float32: ("<f", "<I")}


def place(value: float, dtype: torch.dtype) -> int:
    """Where a finite number stands among all numbers of its dtype; -0 stands just below +0."""
    if dtype == torch.bfloat16:
        bits, width = struct.unpack("<I", struct.pack("<f", value))[0] >> 16, 16
    else:
        to, of = _PACK[dtype]
        bits, width = struct.unpack(of, struct.pack(to, value))[0], 8 * struct.calcsize(of)
    sign = 1 << (width - 1)
    return bits if bits < sign else -1 - (bits - sign)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ulp_distances_count_representable_numbers(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).smallest_normal
    points = torch.tensor([-2.0, -1.0, -tiny, -0.0, 0.0, tiny, 0.5, 1.0, 1.0078125, 3.0]).to(dtype)
    for x in points:
        for y in points:
            ulps = metrics_of(x.reshape(1, 1), y.reshape(1, 1)).max_ulp
            assert ulps == abs(place(float(x), dtype) - place(float(y), dtype)), (x, y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_are_one_ulp_apart(dtype: torch.dtype) -> None:
    for value in (1.0, 2.0, -1.0, 0.75, -3.5):
        x = torch.tensor([[value]], dtype=dtype)
        kind = torch.int32 if dtype == torch.float32 else torch.int16
        y = (x.view(kind) + 1).view(dtype)
        assert float(x) != float(y)
        assert metrics_of(x, y).max_ulp == 1
    zero, minus = torch.zeros(1, 1, dtype=dtype), -torch.zeros(1, 1, dtype=dtype)
    assert metrics_of(zero, minus).max_ulp == 1
    assert metrics_of(zero, minus).elements == 1
    assert metrics_of(zero, zero).max_ulp == 0


@given(st.lists(st.integers(-(2**15), 2**15 - 1), min_size=2, max_size=40))
def test_ordered_bits_have_the_order_of_the_numbers(patterns: list[int]) -> None:
    values = torch.tensor(patterns, dtype=torch.int16).view(torch.bfloat16)
    values = values[~values.isnan()]
    ordered = _ordered_bits(values).tolist()
    for x, bits_x in zip(values.tolist(), ordered, strict=True):
        for y, bits_y in zip(values.tolist(), ordered, strict=True):
            if x < y:
                assert bits_x < bits_y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 3, 63, 257])
def test_value_metrics_are_those_of_float64(dtype: torch.dtype, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    a = torch.randn(5, width, generator=generator).to(dtype)
    b = (a.float() * 1.01 + 1e-3).to(dtype)
    b[4] = a[4]
    metrics = metrics_of(a, b)
    x, y = a.double().numpy(), b.double().numpy()
    assert metrics.rows == 5
    assert metrics.elements == int((x != y).sum())
    assert metrics.max_abs == np.abs(y - x).max()
    relative = [
        math.sqrt(math.fsum((q - p) ** 2))
        / max(math.sqrt(math.fsum(p**2)), math.sqrt(math.fsum(q**2)))
        for p, q in zip(x, y, strict=True)
    ]
    assert metrics.max_rel_l2 == pytest.approx(max(relative), rel=1e-12)
    assert metrics.sum_rel_l2 == pytest.approx(math.fsum(relative), rel=1e-12)
    cosine = [
        math.fsum(p * q) / math.sqrt(math.fsum(p**2) * math.fsum(q**2))
        for p, q in zip(x, y, strict=True)
    ]
    assert metrics.min_cosine == pytest.approx(min(cosine), rel=1e-12)


def test_opposite_and_orthogonal_rows_have_their_cosine() -> None:
    a = torch.tensor([[1.0, 0.0]])
    assert metrics_of(a, torch.tensor([[0.0, 2.0]])).min_cosine == pytest.approx(0, abs=1e-15)
    assert metrics_of(a, -3 * a).min_cosine == pytest.approx(-1)


def test_a_row_against_zeros_is_wholly_different() -> None:
    metrics = metrics_of(torch.ones(1, 4), torch.zeros(1, 4))
    assert metrics.max_rel_l2 == 1.0
    # Zeros have no direction, and certainly not the same one.
    assert not metrics.min_cosine >= 1.0


def test_zeros_of_unlike_sign_are_no_distance_apart() -> None:
    metrics = metrics_of(torch.zeros(1, 3), -torch.zeros(1, 3))
    assert (metrics.max_abs, metrics.max_rel_l2, metrics.elements) == (0.0, 0.0, 3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nan_row_stays_nan(bad: float) -> None:
    a, b = torch.ones(2, 3), torch.full((2, 3), 1.5)
    b[1, 2] = bad
    metrics = ValueMetrics()
    norm = torch.tensor([3**0.5, 3**0.5], dtype=torch.float64)
    # Norms are of the finite entries, as a trace keeps them.
    norm_b = torch.tensor([1.5 * 3**0.5, 1.5 * 2**0.5], dtype=torch.float64)
    metrics.add(a, b, norm, norm_b, torch.tensor([True, True]))
    assert not math.isfinite(metrics.max_abs)
    assert not math.isfinite(metrics.max_rel_l2)
    assert not math.isfinite(metrics.sum_rel_l2)
    assert not (math.isfinite(metrics.min_cosine) and metrics.min_cosine > -1)


def test_bits_of_different_dtypes_are_compared_by_value() -> None:
    a = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16)
    b = torch.tensor([[1.0, 2.0, 3.5]], dtype=torch.float32)
    metrics = metrics_of(a, b)
    assert (metrics.elements, metrics.max_ulp, metrics.max_abs) == (1, 0, 0.5)


@given(st.integers(1, 12), st.integers(1, 12))
def test_blocks_do_not_matter(first: int, second: int) -> None:
    generator = torch.Generator().manual_seed(first * 13 + second)
    a = torch.randn(12, 5, generator=generator)
    b = a + 0.01 * torch.randn(12, 5, generator=generator)
    mask = torch.rand(12, generator=generator) < 0.5
    whole = metrics_of(a, b, mask)
    parts = ValueMetrics()
    cuts = sorted({0, first, second, 12})
    for start, stop in pairwise(cuts):
        at = slice(start, stop)
        norms = [torch.linalg.vector_norm(t[at].double(), dim=1) for t in (a, b)]
        parts.add(a[at], b[at], *norms, mask[at])
    assert (parts.rows, parts.elements, parts.max_ulp) == (
        whole.rows,
        whole.elements,
        whole.max_ulp,
    )
    assert parts.max_abs == whole.max_abs
    assert parts.sum_rel_l2 == pytest.approx(whole.sum_rel_l2, rel=1e-13)
    assert parts.frontier.tolist() == whole.frontier.tolist()


def test_the_frontier_is_of_introduced_rows_alone() -> None:
    a, b = torch.tensor([[1.0], [2.0]]), torch.tensor([[5.0], [2.5]])
    assert metrics_of(a, b, torch.tensor([False, True])).frontier.tolist() == [[2.5, 0.5]]
    assert metrics_of(a, b, torch.tensor([False, False])).frontier.tolist() == []


positive = st.floats(0, 1e6, allow_subnormal=False)
tolerances = st.floats(0, 10, allow_subnormal=False)


@given(st.lists(st.tuples(positive, positive), max_size=60), st.tuples(tolerances, tolerances))
def test_the_frontier_decides_as_all_points_do(
    points: list[tuple[float, float]], tolerance: tuple[float, float]
) -> None:
    atol, rtol = tolerance
    frontier = error_frontier(np.array(points).reshape(-1, 2))
    ratio = tolerance_ratio([(float(m), float(e)) for m, e in frontier], atol, rtol)
    largest = 0.0
    for magnitude, error in points:
        bound = atol + rtol * magnitude
        if error:
            largest = max(largest, error / bound if bound else math.inf)
    assert ratio == largest


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=30))
def test_the_frontier_is_small_and_made_of_points(points: list[tuple[int, int]]) -> None:
    frontier = error_frontier(np.array(points, dtype=float).reshape(-1, 2)).tolist()
    assert all((m, e) in points and e > 0 for m, e in frontier)
    assert frontier == sorted(frontier)
    # Each point has a larger magnitude and a larger error than the one before it.
    assert all(m < n and e < f for (m, e), (n, f) in pairwise(frontier))


def test_tolerated_means_at_most_one() -> None:
    assert tolerance_ratio([(2.0, 0.5)], 0.1, 0.2) == 1.0
    assert tolerance_ratio([(2.0, 0.5)], 0.0, 0.2) == 1.25
    assert tolerance_ratio([(0.0, 1e-300)], 0.0, 1.0) == math.inf
    assert tolerance_ratio([], 0.0, 0.0) == 0.0
