"""Split accumulation: where segments begin, that nothing is lost between two, who splits."""

from dataclasses import replace

import pytest
import rlk_kernels as rk
import torch
from linear_logp_suite import case, equals_logp_of_linear, error
from rlk_kernels.matmul import split
from rlk_kernels.ops.linear_logp import plan

HALF = torch.bfloat16


@pytest.mark.parametrize("k", [769, 1000, 1024, 1025, 1600, 2048, 3072, 4096, 8192, 14336])
def test_segments_follow_from_k(k):
    length, last = split.segments(k, HALF, torch.float32)
    assert length % split.SEGMENT_UNIT == 0
    assert last % length == 0
    assert split.SEGMENT_UNIT < length <= split.LONGEST_SEGMENT
    assert last > 0
    assert split.SEGMENT_UNIT < k - last <= length + split.SEGMENT_UNIT


def test_wider_outputs_have_the_same_sums():
    assert split.segments(4096, HALF, torch.float64) == split.segments(4096, HALF, torch.float32)


def test_other_sums_are_not_split():
    assert split.segments(768, HALF, torch.float32) == (0, 0)
    assert split.segments(4096, HALF, HALF) == (0, 0)
    assert split.segments(4096, torch.float32, torch.float32) == (0, 0)


@pytest.fixture
def short_segments(monkeypatch):
    monkeypatch.setattr(split, "LONGEST_SEGMENT", 96)
    monkeypatch.setattr(split, "SEGMENT_UNIT", 32)


def test_nothing_is_lost_between_segments(short_segments):
    """Integers: every sum is exact, so that of several segments must be too, 24 bits and all."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-200, 201, (33, 400), generator=generator).half()
    w = torch.randint(-200, 201, (40, 400), generator=generator).half()
    assert split.segments(400, x.dtype, torch.float32) == (96, 288)
    exact = (x.double() @ w.double().mT).float()
    assert int(exact.abs().max()) > 1 << 16
    assert torch.equal(rk.linear(x, w, out_dtype=torch.float32, backend="triton"), exact)


@pytest.mark.parametrize("v", [256, 131])
def test_linear_logp_splits_as_linear_does(v, short_segments, monkeypatch):
    c = case(35, 300, v, torch.float16, "cpu", "peaked")
    assert equals_logp_of_linear(c, "triton", torch.float32, 0.7)
    assert equals_logp_of_linear(c, "triton", torch.bfloat16, 0.7)
    split = rk.linear_logp(c.hidden, c.weight, c.target, backend="triton")
    # the planted fault: one of the two not split
    for name in ("plan_epilogue", "plan_pick"):
        make = getattr(plan, name)
        monkeypatch.setattr(
            plan, name, lambda *a, make=make: replace(make(*a), segment=0, last_segment=0)
        )
    assert not equals_logp_of_linear(c, "triton", torch.float32, 0.7)
    whole = rk.linear_logp(c.hidden, c.weight, c.target, backend="triton")
    assert 0.0 < error(split, whole) < 1e-4
