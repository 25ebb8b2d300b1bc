"""sample: what is drawn has the distribution, and draws of other positions and requests are
independent. The limits are those of a chi-square test at 1e-6; the draws are fixed, so a test that
passes passes always.

V = vocabulary
"""

import math

import pytest
import rlk_kernels as rk
import torch
from rlk_kernels.ops.sample.operator import sample_ref
from sample_suite import improbable
from torch import Tensor

V = 23
SETTINGS = (
    {}, {"temperature": 0.6}, {"temperature": 1.7, "top_k": 9}, {"top_p": 0.8}, {"min_p": 0.1},
    {"temperature": 0.9, "top_k": 15, "top_p": 0.9, "min_p": 0.01},
)  # fmt: skip


def logits(scale: float = 1.0) -> Tensor:
    x = torch.randn(V, generator=torch.Generator().manual_seed(1)) * 1.5 * scale
    x[7] = -math.inf
    x[9] = x[3]
    return x


def drawn(x: Tensor, count: int, key: int, backend: str = "torch", **settings) -> Tensor:
    """The tokens of positions 0, 1, ... of a request."""
    keys = torch.full((count,), key)
    rows = x.expand(count, -1)
    return rk.sample(rows, keys, torch.arange(count), **settings, backend=backend).ids


def check(count: int, settings: dict, backend: str = "torch", key: int = 11) -> None:
    x = logits()
    ids = drawn(x, count, key, backend, **settings)
    expected = sample_ref(x, **settings) * count
    assert not improbable(torch.bincount(ids, minlength=V), expected)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_distribution(settings: dict) -> None:
    check(40_000, settings)


@pytest.mark.whole_matrix
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_distribution_of_a_million_draws(settings: dict) -> None:
    check(1_000_000, settings)
    check(100, settings, "triton")


def test_another_distribution_is_seen() -> None:
    """The control: logits that are 6 % larger."""
    ids = drawn(logits(1.06), 100_000, key=5)
    assert improbable(torch.bincount(ids, minlength=V), sample_ref(logits()) * 100_000)


def pairs(one: Tensor, other: Tensor) -> Tensor:
    return torch.bincount(one * V + other, minlength=V * V)


@pytest.mark.parametrize("count", [40_000, pytest.param(1_000_000, marks=pytest.mark.whole_matrix)])
def test_positions_and_requests_are_independent(count: int) -> None:
    x = logits(0.3)
    p = sample_ref(x)
    expected = (p[:, None] * p[None, :]).flatten() * (count - 1)
    first, second = drawn(x, count, key=8), drawn(x, count, key=9)
    assert not improbable(pairs(first[:-1], first[1:]), expected)
    assert not improbable(pairs(first[1:], second[1:]), expected)
    copied = torch.where(torch.arange(count) % 20 == 0, first, second)  # the control
    assert improbable(pairs(first[1:], copied[1:]), expected)


def test_a_long_tail_keeps_its_share() -> None:
    """Most of the mass is in tokens of which each is improbable."""
    x = torch.zeros(1, 2000)
    x[0, 77] = 6.0
    count = 1000
    keys = torch.arange(count)
    ids = rk.sample(x.expand(count, -1), keys, torch.zeros_like(keys), backend="torch").ids
    share = torch.softmax(x[0].double(), 0)[77]
    seen = (ids == 77).sum()
    observed = torch.tensor([seen, count - seen])
    assert not improbable(observed, torch.tensor([share, 1 - share]) * count)
    quarter = torch.bincount(ids[ids != 77] // 500, minlength=4)
    assert not improbable(quarter, torch.full((4,), float(quarter.sum()) / 4).double())
