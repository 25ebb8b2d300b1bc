"""Sums in chains: where they begin, that nothing is lost between two, who takes them."""

import pytest
import rlk_kernels as rk
import torch
from linear_logp_suite import case, equals_logp_of_linear, error
from rlk_kernels import chains, linear_logp_triton

HALF = torch.bfloat16


@pytest.mark.parametrize("k", [769, 1000, 1024, 1025, 1600, 2048, 3072, 4096, 8192, 14336])
def test_chains_follow_from_k(k):
    length, last = chains.chains(k, HALF, torch.float32)
    assert length % chains.STEP == 0
    assert last % length == 0
    assert chains.STEP < length <= chains.LONGEST
    assert last > 0
    assert chains.STEP < k - last <= length + chains.STEP


def test_wider_outputs_have_the_same_sums():
    assert chains.chains(4096, HALF, torch.float64) == chains.chains(4096, HALF, torch.float32)


def test_other_sums_are_one_chain():
    assert chains.chains(768, HALF, torch.float32) == (0, 0)
    assert chains.chains(4096, HALF, HALF) == (0, 0)
    assert chains.chains(4096, torch.float32, torch.float32) == (0, 0)


@pytest.fixture
def short_chains(monkeypatch):
    monkeypatch.setattr(chains, "LONGEST", 96)
    monkeypatch.setattr(chains, "STEP", 32)


def test_nothing_is_lost_between_chains(short_chains):
    """Integers: every sum is exact, so that of several chains must be too, 24 bits and all."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-200, 201, (33, 400), generator=generator).half()
    w = torch.randint(-200, 201, (40, 400), generator=generator).half()
    assert chains.chains(400, x.dtype, torch.float32) == (96, 288)
    exact = (x.double() @ w.double().mT).float()
    assert int(exact.abs().max()) > 1 << 16
    assert torch.equal(rk.linear(x, w, out_dtype=torch.float32, backend="triton"), exact)


@pytest.mark.parametrize("v", [256, 131])
def test_linear_logp_takes_the_chains_of_linear(v, short_chains, monkeypatch):
    c = case(35, 300, v, torch.float16, "cpu", "peaked")
    assert equals_logp_of_linear(c, "triton", torch.float32, 0.7)
    assert equals_logp_of_linear(c, "triton", torch.bfloat16, 0.7)
    chained = rk.linear_logp(c.hidden, c.weight, c.target, backend="triton")
    # the planted fault: one of the two in one chain
    monkeypatch.setattr(linear_logp_triton, "chains", lambda *_: (0, 0))
    assert not equals_logp_of_linear(c, "triton", torch.float32, 0.7)
    whole = rk.linear_logp(c.hidden, c.weight, c.target, backend="triton")
    assert 0.0 < error(chained, whole) < 1e-4
