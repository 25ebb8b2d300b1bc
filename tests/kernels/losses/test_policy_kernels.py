"""Preparation and reduction of the loss on Triton (in the interpreter) against portable.py."""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from rlk_kernels.losses.linear_grpo.operator import LOSS_TYPES
from rlk_kernels.losses.policy import kernels, portable
from rlk_kernels.losses.policy.objective import Objective

LOSS = Objective("grpo", 0.2, 0.2, beta=0.1)
RAGGED = [0, 0, 7, 7, 600, 601, 1300, 1300]
"""Bounds of seven sequences, three of them empty."""


def unprepared(t, sequences, spread, seed=0):
    """(target, mask, advantages) of t tokens; a few ids are ignored or negative."""
    r = torch.Generator().manual_seed(seed)
    target = torch.randint(0, 9, (t,), generator=r)
    target[::7], target[3::11] = -100, -5
    mask = torch.rand(t, generator=r) > 0.3
    return target, mask, torch.randn(sequences if spread else t, generator=r)


@pytest.mark.parametrize("spread", [True, False])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_kernels_prepare_tokens_as_torch_does(loss_type, spread):
    t = RAGGED[-1]
    target, mask, advantages = unprepared(t, 7, spread)
    for bounds, kind in ((RAGGED, torch.int64), (RAGGED, torch.int32), (None, None)):
        cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=kind)
        sequences = 7 if bounds else 4
        per_sequence = advantages[:4] if spread and bounds is None else advantages
        for counted in (mask, mask.double() * 2, torch.zeros(t)):
            how = (spread, cu_seqlens, sequences, loss_type, 40)
            arguments = (target, counted, per_sequence, *how, -100)
            pairs = zip(kernels.prepare(*arguments), portable.prepare(*arguments), strict=True)
            assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)
        small = (target.int(), mask, per_sequence.double(), *how, 3)
        pairs = zip(kernels.prepare(*small), portable.prepare(*small), strict=True)
        assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("bounds", [[0, 10, 15], [5, 10, 1 << 40], [-9, 3, 18], [30, 20, 10]])
def test_tokens_that_no_sequence_holds_are_nan(bounds):
    """What a GPU is not asked for: wrong bounds read nothing out of range, and show."""
    t, cu_seqlens = 20, torch.tensor(bounds)
    mask, ids = torch.ones(t), torch.zeros(t).long()
    mask[19] = 0
    _, advantages, weights = kernels.prepare(
        ids, mask, torch.tensor([1.0, 2.0]), True, cu_seqlens, 2, "grpo", 1, -100
    )
    token = torch.arange(t)
    held = [(token >= a) & (token < b) for a, b in pairwise(bounds)]
    known = held[0] | held[1]
    assert torch.equal(advantages.isnan(), ~known)
    assert torch.equal(weights.isnan(), ~known & (mask != 0))
    assert float(weights[19].nan_to_num()) == 0.0


def terms(t, seed=0):
    """(logp, old_logp, advantages, ref_logp, mask, weights) [T], NaN and Inf where masked out."""
    r = torch.Generator().manual_seed(seed)
    logp, more, advantages, ref = (torch.randn(t, generator=r) for _ in range(4))
    mask = torch.rand(t, generator=r) > 0.2
    old, ref = logp + 0.3 * more, logp + 0.2 * ref
    for i, x in enumerate((logp, old, advantages, ref)):
        x[~mask & (torch.arange(t) % 5 == i)] = (float("nan"), float("inf"), -float("inf"))[i % 3]
    return logp, old, advantages, ref, mask, mask.double() / (0.7 * max(t, 1))


def reduced(logp, old, advantages, ref, mask, w, loss):
    """((loss, metrics) of `kernels`, those of `portable`)."""
    mine = kernels.reduce_loss(logp, old, advantages, w, ref, loss)
    exact = portable.reduce_loss(logp, old, advantages, w, ref, loss)
    assert mine[1].keys() == exact[1].keys()
    return mine, exact


@pytest.mark.parametrize("t", [0, 1, 511, 512, 1300, 64 * 512 + 5])
def test_the_kernels_reduce_as_torch_does(t):
    logp, old, advantages, ref, mask, w = terms(t)
    tiny = {"ratio_min": float("inf")} if not bool(mask.any()) else {}
    for logps, beta in (((old, ref), 0.1), ((old, None), 0.0), ((None, ref), 0.0)):
        loss = Objective("grpo", 0.2, 0.28, beta=beta)
        (value, mine), (expected, exact) = reduced(
            logp, logps[0], advantages, logps[1], mask, w, loss
        )
        assert (value.shape, value.dtype) == ((), torch.float32)
        assert abs(float(value) - float(expected)) <= 1e-7 * (abs(float(expected)) + 1e-3)
        for name, x in mine.items():
            assert (x.shape, x.dtype) == ((), torch.float32)
            y = float(exact[name])
            assert float(x) == tiny.get(name, y) or abs(float(x) - y) <= 1.3e-7 * abs(y), name


def test_a_mask_of_zeros_reduces_to_nothing_whatever_the_tokens_hold():
    nan, none = torch.full((700,), float("nan")), torch.zeros(700)
    value, metrics = kernels.reduce_loss(nan, nan, nan, none.double(), nan, LOSS)
    assert float(value) == 0.0
    rest = {name: float(x) for name, x in metrics.items() if float(x) != 0.0}
    assert rest == {"ratio_min": float("inf")}


@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_a_nan_in_a_token_that_counts_shows(which):
    for at in (4, 1299):
        inputs = list(terms(1300))
        inputs[4][at], inputs[5][at] = True, 1e-3
        for i, x in enumerate(inputs[:4]):
            x[at] = float("nan") if i == which else 0.0
        (value, mine), (expected, exact) = reduced(*inputs, LOSS)
        assert bool((value + expected.float()).isnan())
        assert [bool(x.isnan()) for x in mine.values()] == [bool(x.isnan()) for x in exact.values()]
        if which < 2:
            assert all(bool(mine[n].isnan()) for n in ("ratio_mean", "ratio_min", "ratio_max"))


@pytest.mark.parametrize(
    "d", [0.0, 1e-9, 1e-6, -1e-6, 1e-3, 0.1249, 0.125, -0.1251, 3.0, -20.0, 40.0]
)
def test_k3_is_precise_for_small_and_large_log_ratios(d):
    one, zero = torch.ones(1), torch.zeros(1)
    old = torch.tensor([-d], dtype=torch.float64)
    _, metrics = kernels.reduce_loss(zero, old, one, one.double(), -old, LOSS)
    x = Fraction(d)
    exact = float(sum((x**i / math.factorial(i) for i in range(2, 200)), Fraction(0)))
    for name in ("k3", "ref_k3"):
        assert abs(float(metrics[name]) - exact) <= 1e-7 * exact
