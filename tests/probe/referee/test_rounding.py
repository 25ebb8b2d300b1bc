"""Errors in units of rounding: exact ulps, rounding alone, and each planted fault."""

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import checkpoint

from rlk_align.judge.contract import STATISTICS
from rlk_align.judge.load import load_contract
from rlk_align.model.prompts import Sample, TokenBatch
from rlk_align.model.shape import read_shape
from rlk_align.model.sites import RowIndex, model_sites
from rlk_align.probe.referee import formulas
from rlk_align.probe.referee.reference import Reference
from rlk_align.probe.referee.rounding import (
    ErrorSums,
    cut_center,
    nearest_cut,
    relative_unit,
    rounding_variance,
)
from rlk_align.results import RoundingErrors

CPU = torch.device("cpu")
BITS = {"float32": (24, -126), "bfloat16": (8, -126), "float16": (11, -14)}
"""Significant bits, and the exponent of the smallest normal number."""
TORCH = {name: getattr(torch, name) for name in BITS}
dtypes = pytest.mark.parametrize("dtype", BITS)


def ulp(x: float, dtype: str) -> float:
    """The gap between neighbours just above |x|, by the bits of float64."""
    bits, least = BITS[dtype]
    (pattern,) = struct.unpack("<Q", struct.pack("<d", x))
    exponent = ((pattern >> 52) & 0x7FF) - 1023
    return math.ldexp(1.0, max(exponent, least) - bits + 1)


NUMBERS = st.floats(-1e38, 1e38, allow_nan=False)


@dtypes
@given(st.lists(NUMBERS, min_size=1))
def test_the_unit_is_an_ulp(dtype: str, numbers: list[float]) -> None:
    variance = rounding_variance(torch.tensor(numbers, dtype=torch.float64), dtype)
    assert variance.tolist() == [(ulp(x, dtype) / 2) ** 2 / 3 for x in numbers]


@dtypes
def test_the_unit_at_its_edges(dtype: str) -> None:
    bits, least = BITS[dtype]
    powers = [2.0**e for e in range(least - bits - 3, 16)]
    edges = [0.0, -0.0, *powers, *(math.nextafter(p, 0) for p in powers), *(-p for p in powers)]
    variance = rounding_variance(torch.tensor(edges, dtype=torch.float64), dtype)
    assert variance.tolist() == [(ulp(x, dtype) / 2) ** 2 / 3 for x in edges]
    # As in torch: numbers with a distance of half an ulp differ, and closer ones do not.
    for x in (1.0, 1.5, 2.0**least, 2.0**least / 2):
        step = math.sqrt(3 * float(rounding_variance(torch.tensor(x).double(), dtype))) * 2
        above = torch.tensor([x + step, x + step * 0.49]).double().to(TORCH[dtype]).double()
        assert above.tolist() == [x + step, x]
    assert relative_unit(dtype) == ulp(1.0, dtype) / math.sqrt(12)


ROWS, HEADS, WIDTH = 160, 4, 16
FEATURES = HEADS * WIDTH


def batch(rows: int = ROWS) -> RowIndex:
    """One sample, or two if there are many rows; token ids repeat, and so do positions."""
    ids = tuple((i * 7) % 13 for i in range(rows))
    half = rows // 2 if rows > 8 else rows
    samples = [Sample("a", ids[:half]), Sample("b", ids[half:])]
    return RowIndex(TokenBatch(tuple(s for s in samples if s.prompt_ids)))


def outputs(rows: int = ROWS, features: int = FEATURES, seed: int = 0) -> torch.Tensor:
    """The output of a layer, with features of different sizes, float64."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.normal(size=(rows, features)) * rng.uniform(0.5, 2.0, features))


def rounded(exact: torch.Tensor, dtype: str = "bfloat16") -> torch.Tensor:
    return exact.to(TORCH[dtype]).double()


def errors(
    got: torch.Tensor,
    exact: torch.Tensor,
    dtype: str = "bfloat16",
    heads: int = HEADS,
    block: int = 1000,
) -> RoundingErrors:
    sums = ErrorSums(exact.shape[1], heads, dtype, CPU)
    variance, numbers = rounding_variance(exact, dtype), np.arange(len(exact))
    for start in range(0, len(exact), block):
        at = slice(start, start + block)
        sums.add(
            got[at], exact[at], variance[at], torch.zeros(len(got[at]), 1).double(), numbers[at]
        )
    return sums.errors(batch(len(exact)))


def over(found: RoundingErrors, op: str = "q_proj", dtype: str = "bfloat16") -> set[str]:
    budget = load_contract({"float16": "fp16", "float32": "fp32"}.get(dtype, "bf16"), dtype).budget(
        op
    )
    return {n for n in STATISTICS if not abs(getattr(found, n)) <= getattr(budget, n)}


@dtypes
@pytest.mark.parametrize("rows", [1, 2, 8, 160, 1500])
def test_rounding_alone_is_one_unit_and_raises_no_alarm(dtype: str, rows: int) -> None:
    for seed in range(8 if rows < 100 else 2):
        exact = outputs(rows, seed=seed)
        measured = errors(rounded(exact, dtype), exact, dtype)
        assert over(measured, dtype=dtype) == set(), measured
        assert 1 - (0.05 if rows > 100 else 0.5) < measured.rms <= 1
        assert (measured.gain, measured.head_gain, measured.feature_gain) == (0, 0, 0)
        assert measured.feature_shift == 0
        assert measured.row_gain < 0.2
        assert measured.row_rms < 1.5
        assert measured.peak < 2.5


@dtypes
def test_exact_outputs_are_exact(dtype: str) -> None:
    exact = rounded(outputs(), dtype)
    measured = errors(exact, exact, dtype)
    assert [getattr(measured, n) for n in STATISTICS] == [0.0] * len(STATISTICS)


@pytest.mark.parametrize("rows", [40, 220, 1500])
def test_outputs_that_are_rounded_less_raise_no_alarm(rows: int) -> None:
    """Like float32 logits of a router in a bf16 model, whose errors are smaller than a rounding."""
    for seed in range(8):
        exact = outputs(rows, features=8, seed=seed)
        exact[0] *= 10
        measured = errors(rounded(exact, "float32"), exact, heads=1)
        assert over(measured) == set(), measured
        assert (measured.gain, measured.feature_gain, measured.feature_shift) == (0, 0, 0)
    off = errors(rounded(exact * 1.01, "float32"), exact, heads=1)
    assert {"rms", "gain"} & over(off) == ({"rms"} if rows == 40 else {"rms", "gain"}), off


@dtypes
def test_large_and_small_rows_features_and_entries_raise_no_alarm(dtype: str) -> None:
    """Rows, features and single entries of very different sizes, like sinks and outliers."""
    for seed in range(4):
        exact = outputs(seed=seed)
        exact[0] *= 100
        exact[:, 5] *= 50
        exact[:, 20] = 0
        exact[3] = 0
        exact[7, 9] = 400
        measured = errors(rounded(exact, dtype), exact, dtype)
        assert over(measured, dtype=dtype) == set(), measured


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("along", [False, True])
def test_a_bias_that_is_added_to_a_rounded_product_is_no_gain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool, along: bool
) -> None:
    """Most of a bias below half an ulp is lost in every row alike; a dropped bias is found.
    `along`: a trained bias is in proportion to the mean of its product."""
    made = checkpoint(tmp_path, "qwen2")
    shape = read_shape(made)
    site = next(s for s in model_sites(shape) if s.op == "q_proj")
    reference = Reference(made, shape, "bfloat16", 1, {}, {}, torch.device("cpu"))
    width = 1536 if along else FEATURES
    sign = outputs(1, width).sign()
    mean = sign * (outputs(1, width, seed=1).abs() if along else 2)
    product, bias = outputs(features=width) + mean, 0.002 * mean[0]
    monkeypatch.setattr(reference, "_bias", lambda site: bias)
    exact, summed = product + bias, rounded(product) + bias
    got = rounded(summed) if late else rounded(product + bias)
    assert bool(over(errors(got, exact))) == late
    assert over(errors(got, reference.nearest(site, exact, got))) == set()
    lost = rounded(product)
    large = product + 0.02 * sign
    monkeypatch.setattr(reference, "_bias", lambda site: 0.02 * sign[0])
    assert over(errors(lost, reference.nearest(site, large, lost)))


def test_a_bias_in_the_first_ranks_partial_sum_has_its_rounding(tmp_path: Path) -> None:
    """A rank's sum is above 2, and the output below it, where numbers are closer together."""
    made = checkpoint(tmp_path, "llama")
    shape = read_shape(made)
    site = next(s for s in model_sites(shape) if s.op == "o_proj")
    added = frozenset({"o_proj"})
    reference = Reference(made, shape, "bfloat16", 2, {}, {}, CPU, added=added)
    weight, x = outputs(FEATURES, 64).abs(), 0.002 * outputs(features=64, seed=1).abs()
    x[:, 32:] *= -4
    bias = torch.full((FEATURES,), 2.0).double()
    first = formulas.linear(x[:, :32], weight[:, :32], bias)
    got = rounded(rounded(first) + rounded(formulas.linear(x[:, 32:], weight[:, 32:], None)))
    exact, extra = reference._sums(site, x, weight, bias)
    assert bool((exact < 2).all() and (first > 2).all())
    unit = rounding_variance(exact, "bfloat16") + extra
    assert 0.8 < float(((got - exact).square().sum() / unit.sum()).sqrt()) < 1.05


def test_a_product_that_rounds_to_its_neighbour_is_no_error_of_a_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bias of half an ulp makes ties: sums of neighbouring products are then 0 or 2 ulps
    apart."""
    made = checkpoint(tmp_path, "qwen2")
    shape = read_shape(made)
    site = next(s for s in model_sites(shape) if s.op == "q_proj")
    reference = Reference(made, shape, "bfloat16", 1, {}, {}, torch.device("cpu"))
    product = 1 + outputs().abs() % 1
    bias = torch.full((FEATURES,), ulp(1.0, "bfloat16") / 2, dtype=torch.float64)
    monkeypatch.setattr(reference, "_bias", lambda site: bias)
    # As of sums in float32.
    noisy = product * (1 + 1e-5 * outputs(seed=3))
    got = rounded(rounded(noisy) + bias)
    assert (got != rounded(rounded(product) + bias)).any()
    exact = product + bias
    assert "peak" not in over(errors(got, reference.nearest(site, exact, got)))


def test_one_large_feature_in_every_head_is_no_gain_of_a_row() -> None:
    """Like keys with the biases of some models: a head's gain is then one rounding."""
    for seed in range(4):
        exact = outputs(seed=seed)
        exact[:, ::WIDTH] = 200 + exact[:, ::WIDTH] * 20
        measured = errors(rounded(exact), exact)
        assert over(measured) == set(), measured


@dtypes
@pytest.mark.parametrize("spread", [0.0, 1e-6, 1e-4])
def test_rounding_alone_raises_no_alarm_where_rows_hardly_differ(dtype: str, spread: float) -> None:
    """Like the output of a clamped activation: each feature is rounded in one direction."""
    for seed in range(4):
        exact = outputs(1, seed=seed) * (1 + spread * outputs(seed=seed))
        assert over(errors(rounded(exact, dtype), exact, dtype), dtype=dtype) == set()
        measured = errors(rounded(exact * (1 + 2.0 ** -BITS[dtype][0]), dtype), exact, dtype)
        assert "gain" in over(measured, dtype=dtype), measured


def scaled(where: Any, by: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def fault(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[where] *= by
        return x

    return fault


def placed(where: Any, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def fault(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[where] = value
        return x

    return fault


def shifted(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[:, 11] += 0.05
    return x


def rows_scaled(x: torch.Tensor) -> torch.Tensor:
    factors = 1 + 0.002 * torch.from_numpy(np.random.default_rng(5).choice([-1, 1], len(x)))
    return x * factors[:, None]


def scattered(x: torch.Tensor) -> torch.Tensor:
    noise = torch.from_numpy(np.random.default_rng(5).normal(size=x.shape))
    return x * (1 + 0.02 * noise)


INDEX = batch()
A_TOKEN = np.flatnonzero(INDEX.token == 3)
A_POSITION = np.flatnonzero(INDEX.position == 6)
A_CHANNEL = np.arange(2, FEATURES, WIDTH)
EVERYTHING = (slice(None), slice(None))
HEAD = (slice(None), slice(WIDTH, 2 * WIDTH))
FAULTS = {
    # The fault; the statistic that must exceed its budget; place, at, manner, amount.
    "all scaled": (scaled(EVERYTHING, 1.02), "gain", "everywhere", 0, "scaled", 0.02),
    "a head scaled": (scaled(HEAD, 0.97), "head_gain", "head", 1, "scaled", -0.03),
    "a feature scaled": (
        scaled((slice(None), 11), 1.05),
        "feature_gain",
        "feature",
        11,
        "scaled",
        0.05,
    ),
    "a feature shifted": (shifted, "feature_shift", "feature", 11, "shifted", 0.05),
    "a channel scaled": (
        scaled((slice(None), A_CHANNEL), 1.1),
        "feature_rms",
        "channel",
        2,
        "scaled",
        0.1,
    ),
    "a row scaled": (scaled(50, 1.2), "row_rms", "row", 50, "scaled", 0.2),
    "a token scaled": (scaled(A_TOKEN, 1.1), "row_rms", "token", 3, "scaled", 0.1),
    "a position scaled": (scaled(A_POSITION, 0.9), "row_rms", "position", 6, "scaled", -0.1),
    "an entry": (placed((50, 11), 9.0), "peak", "row", 50, "scattered", 0.0),
    "rows scaled": (rows_scaled, "row_gain", "everywhere", 0, "rows scaled", 0.002),
    "scattered": (scattered, "rms", "everywhere", 0, "scattered", 0.0),
    "zeros": (placed(EVERYTHING, 0.0), "gain", "everywhere", 0, "scaled", -1.0),
    "a row of NaN": (placed(50, math.nan), "row_rms", "row", 50, "scattered", 0.0),
    "one NaN": (placed((50, 11), math.nan), "peak", "row", 50, "scattered", 0.0),
    "one infinity": (placed((50, 11), -math.inf), "rms", "row", 50, "scattered", 0.0),
    "a feature of NaN": (
        placed((slice(None), 11), math.nan),
        "feature_rms",
        "feature",
        11,
        "scattered",
        0.0,
    ),
    "a head of NaN": (placed(HEAD, math.nan), "head_gain", "head", 1, "scattered", 0.0),
    "all NaN": (placed(EVERYTHING, math.nan), "row_gain", "everywhere", 0, "scattered", 0.0),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen_and_told(name: str) -> None:
    fault, statistic, place, at, manner, amount = FAULTS[name]
    exact = outputs()
    measured = errors(rounded(fault(exact)), exact)
    assert statistic in over(measured), measured
    looks = measured.pattern
    assert (looks.place, looks.at, looks.manner) == (place, at, manner), looks
    assert looks.amount == pytest.approx(amount, rel=0.15, abs=1e-9)


@pytest.mark.parametrize("where", [0, (slice(None), 5)], ids=["row", "feature"])
@pytest.mark.parametrize("fault", ["all scaled", "rows scaled", "zeros"])
def test_what_is_everywhere_is_so_beside_one_large_row_or_feature(where: Any, fault: str) -> None:
    exact = outputs()
    exact[where] *= 300
    looks = errors(rounded(FAULTS[fault][0](exact)), exact).pattern
    assert (looks.place, looks.manner) == ("everywhere", FAULTS[fault][4]), looks


def test_where_the_worst_of_each_is() -> None:
    exact = outputs()
    assert errors(rounded(scaled(HEAD, 0.97)(exact)), exact).head == 1
    assert errors(rounded(shifted(exact)), exact).feature == 11
    assert errors(rounded(scaled(50, 1.2)(exact)), exact).row == (0, 50)
    assert errors(rounded(scaled(ROWS - 1, math.nan)(exact)), exact).row == (1, 79)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rows", [1, 2, ROWS])
def test_what_is_not_finite_is_infinitely_off(bad: float, rows: int) -> None:
    exact = outputs(rows)
    measured = errors(placed((rows - 1, 11), bad)(rounded(exact)), exact)
    sizes = {n: abs(getattr(measured, n)) for n in STATISTICS}
    assert sizes == dict.fromkeys(STATISTICS, math.inf)


def test_an_error_where_the_exact_output_is_zero_counts() -> None:
    exact = outputs()
    exact[:, 11] = 0
    got = rounded(exact)
    got[:, 11] = 1e-3
    assert {"feature_rms", "feature_shift"} <= over(errors(got, exact))
    nothing = torch.zeros(3, FEATURES, dtype=torch.float64)
    assert over(errors(nothing, nothing)) == set()
    assert {"rms", "row_rms", "peak"} <= over(errors(nothing + 1e-3, nothing))


@settings(max_examples=20)
@given(st.integers(1, ROWS), st.sampled_from(list(FAULTS)))
def test_blocks_of_any_size_give_the_same(block: int, name: str) -> None:
    exact = outputs()
    got = rounded(FAULTS[name][0](exact))
    whole, parts = errors(got, exact), errors(got, exact, block=block)
    for statistic in STATISTICS:
        a, b = getattr(whole, statistic), getattr(parts, statistic)
        assert a == b or abs(a - b) <= 1e-12 * max(1, abs(a)), statistic
    assert (whole.pattern.place, whole.pattern.at) == (parts.pattern.place, parts.pattern.at)
    assert whole.row == parts.row


@pytest.mark.parametrize("features", [1, 2, 3])
def test_narrow_outputs(features: int) -> None:
    exact = outputs(ROWS, features) - 5
    assert over(errors(rounded(exact), exact, heads=1)) <= {"row_gain"}
    assert "rms" in over(errors(rounded(exact * 1.1), exact, heads=1))
    as_heads = errors(rounded(exact), exact, heads=features)
    assert as_heads.row_gain == 0


def norm_errors(dtype: str, mean_square: float, outside: bool) -> RoundingErrors:
    """1,000 rows of 64 entries with this mean square, normed in `dtype` with an epsilon of 1e-5
    inside or outside of the root; the exact one has it inside."""
    drawn, eps = torch.Generator().manual_seed(0), 1e-5
    x = (torch.randn(1000, 64, generator=drawn) * math.sqrt(mean_square)).to(TORCH[dtype])
    weight = (torch.rand(64, generator=drawn) + 0.5).to(TORCH[dtype])
    squares = x.float().square().mean(-1, keepdim=True)
    root = squares.sqrt() + eps if outside else (squares + eps).sqrt()
    got = weight * (x.float() / root).to(TORCH[dtype])
    wide = x.double()
    exact = weight.double() * formulas.rms_norm(wide, torch.ones(64, dtype=torch.float64), eps)
    return errors_of(got.double(), exact, dtype)


def errors_of(got: torch.Tensor, exact: torch.Tensor, dtype: str) -> RoundingErrors:
    sums = ErrorSums(exact.shape[1], 1, dtype, CPU)
    nothing = torch.zeros(len(exact), 1, dtype=torch.float64)
    sums.add(got, exact, rounding_variance(exact, dtype), nothing, np.arange(len(exact)))
    batch = TokenBatch((Sample("0", tuple(range(len(exact)))),))
    return sums.errors(RowIndex(batch))


@pytest.mark.parametrize(
    ("dtype", "mean_square", "gain"),
    [
        ("bfloat16", 1e-4, 21.0),
        ("bfloat16", 1e-3, 2.0),
        ("bfloat16", 3e-3, 0.6),
        ("bfloat16", 0.1, 0.0),
        ("bfloat16", 1.0, 0.0),
        ("float32", 1e-3, 1.34e5),
        ("float32", 1.0, -141.0),
    ],
)
def test_an_epsilon_outside_of_the_root_shows_by_the_size_of_its_rows(
    dtype: str, mean_square: float, gain: float
) -> None:
    """It scales a row by 1 + eps / (2 ms) − eps / √ms: in bf16 that is beyond a rounding where the
    mean square is small beside eps, and in float32 always, but at 1/4, where the two are equal."""
    outside = norm_errors(dtype, mean_square, outside=True)
    assert outside.gain == pytest.approx(gain, rel=0.1, abs=0.05)
    healthy = norm_errors(dtype, mean_square, outside=False)
    assert abs(healthy.gain) < 0.5


@pytest.mark.parametrize("cuts", [True, False])
def test_numbers_that_are_cut_off_have_no_gain_against_the_center_of_their_interval(
    cuts: bool,
) -> None:
    """Rounded numbers have no gain against themselves, and cut ones do: that is what is allowed
    for."""
    exact = torch.randn(400, 64, generator=torch.Generator().manual_seed(0)).double()
    exact[0] = exact[0].bfloat16()  # nothing to cut off
    bits = exact.float().view(torch.int32)
    cut = (bits & -65536).view(torch.float32).double()
    got = cut if cuts else exact.bfloat16().double()
    wanted = nearest_cut(exact, got, "bfloat16")
    assert wanted.equal(cut_center(exact, "bfloat16")) == cuts
    # A number just above a power of two has its center below it, where the ulp is half as large.
    assert (wanted.bfloat16().double() == got).double().mean() > 0.99
    gain = float((got * exact - exact * exact).sum() / exact.square().sum())
    against = float(((got - wanted) * exact).sum() / exact.square().sum())
    assert abs(against) < 1e-4
    assert (abs(gain) > 20 * abs(against)) == cuts


def test_a_factor_is_no_cut() -> None:
    exact = torch.randn(400, 64, generator=torch.Generator().manual_seed(0)).double()
    got = (exact * 0.98).bfloat16().double()
    wanted = nearest_cut(exact, got, "bfloat16")
    assert float((got - wanted).square().sum() / exact.square().sum()) ** 0.5 > 0.015
