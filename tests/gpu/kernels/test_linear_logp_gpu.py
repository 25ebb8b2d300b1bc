"""On a GPU: linear_logp and linear_grpo_loss against float64, their bits, memory and gradients."""

import time
from dataclasses import replace

import pytest
import rlk_kernels as rk
import torch
from kernel_suite import same
from linear_logp_suite import (
    KINDS,
    case,
    equals_logp_of_linear,
    error,
    gradients,
    gradients_within_budget,
    outputs,
    rows_that_differ,
    run_ours,
    truth,
    upstreams,
)
from rival_cases import (
    CCE,
    CCE_SHAPES,
    LIGER,
    LIGER_LARGE,
    VERL_SHAPES,
    cut_cross_entropy,
    liger,
    verl,
)
from rlk_kernels.device import facts
from rlk_kernels.losses.linear_grpo import plan as linear_grpo
from rlk_kernels.matmul import plan as matmul
from rlk_kernels.matmul.accumulate import accumulate
from rlk_kernels.matmul.hopper import accumulate as accumulate_hopper
from rlk_kernels.matmul.tiles import SAFE, STATISTICS, STORE, Tile
from rlk_kernels.ops.linear_logp import plan
from rlk_kernels.ops.linear_logp.operator import linear_logp_ref

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
HALF = torch.bfloat16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_errors_and_gradients_against_float64(kind, dtype):
    c = case(257, 512, 5003, dtype, "cuda", kind)
    for value, exact in zip(outputs(c, "triton"), truth(c), strict=True):
        # sums of 512 terms of one sign near -200, and an offset of 1e4: what fp32 leaves of them
        limit = {"negative": 1e-3, "offset": 2e-3}.get(kind, 1e-4)
        assert error(value, exact) <= limit
    assert max(gradients_within_budget(c, "triton", logp_only=True)) <= 1.0


@pytest.mark.parametrize("h", [1024, 1500, 2048, 4096])
def test_errors_on_peaked_logits_of_long_sums(h):
    """Logits of standard deviation 12; tokens drawn from the softmax, and any."""
    torch.manual_seed(2)
    hidden = torch.randn(1000, h, device="cuda").to(HALF)
    weight = (torch.randn(32000, h, device="cuda") * 12 * h**-0.5).to(HALF)
    exact = torch.log_softmax(hidden.double() @ weight.double().T, -1)
    for target in (
        torch.multinomial(exact.exp(), 1), torch.randint(0, 32000, (1000, 1), device="cuda")
    ):  # fmt: skip
        logp = rk.linear_logp(hidden, weight, target[:, 0])
        assert error(logp, exact.gather(-1, target)[:, 0]) <= 1e-4


@pytest.mark.parametrize("logit_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_of_logp_of_linear(dtype, logit_dtype):
    """Vocabularies in multiples of 128, ragged, smaller than a tile; with and without TMA."""
    whole = ((300, 512, 4096 + 128), (257, 512, 5003), (33, 40, 18992), (1, 72, 96))
    split = ((300, 1600, 4096 + 128), (257, 1001, 5003), (33, 2048, 512), (700, 832, 1000))
    split += ((257, 1600, 5003), (300, 1024, 32000 + 16), (1000, 776, 33001))
    for t, h, v in whole + split:
        c = case(t, h, v, dtype, "cuda", "peaked", bias=v > 4096 and v < 6000)
        assert equals_logp_of_linear(c, "triton", logit_dtype, 0.7), (t, h, v)


@pytest.mark.parametrize(("t", "h", "v"), [(4096, 4096, 128256), (1024, 1024, 151936)])
def test_the_bits_of_logp_of_linear_at_full_size(t, h, v):
    c = case(t, h, v, HALF, "cuda")
    assert equals_logp_of_linear(c, "triton", torch.float32, 1.0)
    assert equals_logp_of_linear(c, "triton", torch.bfloat16, 0.7)
    exact = linear_logp_ref(c.hidden[:64], c.weight, c.target[:64])[0]
    assert error(rk.linear_logp(c.hidden, c.weight, c.target)[:64], exact) <= 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("h", "v"), [(512, 4096 + 128), (512, 5003), (1600, 2048 + 128), (1600, 5003)]
)
def test_a_row_does_not_depend_on_its_batch(h, v, dtype):
    c = case(1000, h, v, dtype, "cuda")
    parts = [slice(f, f + m) for m in (1, 17, 64, 129, 512) for f in (0, 333, 1000 - m)]
    assert rows_that_differ(c, "triton", [*parts, torch.randperm(1000, device="cuda")]) == 0


@pytest.mark.parametrize("h", [512, 1600])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_and_chunks_change_no_bit(dtype, h, monkeypatch):
    c = case(300, h, 2000 - 2000 % 128, dtype, "cuda")
    ups = upstreams(c)

    def everything():
        return *outputs(c, "triton"), *gradients(c, run_ours(c, "triton"), ups)

    whole = everything()
    size = c.hidden.element_size()
    changes = [
        (plan, "WORKSPACE_BYTES", 300 * size * (h + 512)),
        (plan, "STATISTICS_BYTES", 128 * 3 * 4 * 8),
        (plan, "ONE_PASS_ELEMENTS", 128 * h),
    ]
    if size == 2:
        changes += [
            (matmul, "STATISTICS", Tile(64, 128, 64, 4, 3)),
            (matmul, "STATISTICS", replace(STATISTICS, warp_specialized=False)),
            (matmul, "STORE", replace(STORE, warp_specialized=False)),
            (matmul, "STORE", SAFE),
        ]
    for module, name, value in changes:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            assert same(everything(), whole), name


@pytest.mark.parametrize(("t", "chunk"), [(4096 + 77, 2000), (200, 128)])
def test_gradients_have_the_same_bits_with_copies_and_products_in_warps_of_their_own(
    t, chunk, monkeypatch
):
    """One chunk or several, of tokens and of the vocabulary, two products in a launch or one, tiles
    of both widths; a T that is no multiple of a tile; sums too short for one half of a tile to be
    ahead of the other."""
    c = case(t, 1024, 8192, HALF, "cuda")
    up = torch.randn(c.target.shape, device="cuda")
    launched = []
    sum_hopper = accumulate_hopper.sum_hopper

    def recorded(planned, partials):
        launched.append(tuple(planned.slices[i].width for i in planned.shared.order))
        sum_hopper(planned, partials)

    monkeypatch.setattr(accumulate_hopper, "sum_hopper", recorded)

    def everything():
        leaves = [x.detach().clone().requires_grad_() for x in (c.hidden, c.weight)]
        grads = torch.autograd.grad(rk.linear_logp(*leaves, c.target), leaves, up)
        lone = torch.autograd.grad(rk.linear_logp(c.hidden, leaves[1], c.target), leaves[1], up)
        loss, _ = rk.linear_grpo_loss(
            leaves[0][None], leaves[1], c.target[None], None, up[:1], torch.ones_like(up)[None]
        )
        return *grads, *lone, *torch.autograd.grad(loss, leaves)

    whole = everything()
    monkeypatch.setattr(plan, "WORKSPACE_BYTES", 2 * t * (2048 + 1024))
    monkeypatch.setattr(linear_grpo, "CHUNK_BYTES", chunk * 8192 * 2)
    assert same(everything(), whole)
    here = facts(up.device)
    if here.gluon and t > chunk * 2:
        assert {(256,), (256, 256), (256, 128)} <= {tuple(sorted(x)[::-1]) for x in launched}
    here = replace(here, gluon=False)
    monkeypatch.setattr(accumulate, "facts", lambda device: here)
    assert same(everything(), whole)


def test_gradients_are_the_same_in_20_runs():
    c = case(700, 1024, 32000, HALF, "cuda")
    ups = upstreams(c)
    first, *repeats = (gradients(c, run_ours(c, "triton"), ups) for _ in range(20))
    assert all(same(repeat, first) for repeat in repeats)


def test_memory_stays_within_its_limits():
    c = case(4096, 2048, 151936, HALF, "cuda")
    hidden, weight = c.hidden.requires_grad_(), c.weight.requires_grad_()
    up = torch.ones(4096, device="cuda")

    def held(call, results):
        call()
        torch.cuda.synchronize()
        time.sleep(0.5)  # the thread of the backward lets go of its results a moment later
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before - results) / 2**20

    def forward():
        with torch.no_grad():
            rk.linear_logp(hidden, weight, c.target)

    def both():
        torch.autograd.grad(rk.linear_logp(hidden, weight, c.target), (hidden, weight), up)

    def grpo():
        loss, _ = rk.linear_grpo_loss(
            hidden[None], weight, c.target[None], None, up[:1], torch.ones_like(up)[None]
        )
        torch.autograd.grad(loss, (hidden, weight))

    gradients_ = 2 * (hidden.numel() + weight.numel())
    assert 0 < held(forward, 0) <= 64
    assert 0 < held(both, gradients_) <= 300
    lower_halves = 2 * weight.numel() / 2**20
    assert 0 < held(grpo, gradients_) <= 512 + lower_halves + 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_grpo_against_float64_its_chunks_and_its_logp(dtype, monkeypatch):
    c = case(600, 512, 4096 + 128, dtype, "cuda")
    bounds = torch.tensor([0, 100, 350, 600], device="cuda")
    r = torch.Generator().manual_seed(1)
    mask = (torch.rand(600, generator=r) > 0.2).long().cuda()
    exact = linear_logp_ref(c.hidden, c.weight, c.target)[0]
    old, ref = (exact + 0.2 * torch.randn(600, generator=r).cuda() for _ in range(2))
    advantages = torch.tensor([1.0, -0.5, 0.7], device="cuda")

    def run(dtype, backend):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (c.hidden, c.weight)]
        loss, metrics = rk.linear_grpo_loss(
            *leaves, c.target, old.float(), advantages, mask, cu_seqlens=bounds,
            ref_logp=ref.float(), beta=0.1, backend=backend,
        )  # fmt: skip
        return loss, metrics["logp"], torch.autograd.grad(300 * loss, leaves)

    loss, logp, grads = run(dtype, "triton")
    expected, _, wide = run(torch.float64, "torch")
    limit = {torch.bfloat16: 8e-3, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
    assert error(loss, expected) <= 1e-5
    for value, truth_ in zip(grads, wide, strict=True):
        assert error(value, truth_) <= limit * float(truth_.abs().max())
    assert torch.equal(logp, rk.linear_logp(c.hidden, c.weight, c.target))
    monkeypatch.setattr(linear_grpo, "CHUNK_BYTES", 128 * 4224 * c.hidden.element_size())
    other, _, chunked = run(dtype, "triton")
    assert torch.equal(loss, other)
    assert same(grads, chunked)


def ours(hidden, weight, target, bias, temperature, softcap):
    return rk.linear_logp(
        hidden, weight, target, bias=bias, temperature=temperature, softcap=softcap,
        return_entropy=True,
    )  # fmt: skip


def ours_with_short_logits(hidden, weight, target, bias, temperature, softcap):
    """Liger's bf16 case expects the logits to be rounded to bf16."""
    return rk.linear_logp(
        hidden, weight, target, temperature=temperature, logit_dtype=hidden.dtype,
        return_entropy=True,
    )  # fmt: skip


def test_the_rivals_own_cases():
    for spec in LIGER:
        assert liger(ours, spec, "cuda"), spec
    for spec in LIGER_LARGE:
        assert liger(ours_with_short_logits, spec, "cuda"), spec
    for shape in CCE_SHAPES:
        for dtype, limit in CCE:
            for softcap, bias in ((None, False), (20.0, True)):
                assert cut_cross_entropy(ours, shape, dtype, limit, softcap, bias, "cuda"), shape
    for shape in VERL_SHAPES:
        assert verl(ours, shape, "cuda"), shape
