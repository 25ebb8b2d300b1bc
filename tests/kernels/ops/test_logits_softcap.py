"""`logp` of capped and scaled logits: right, batch-invariant, and the bits of `linear_logp`."""

import pytest
import rlk_kernels as rk
import torch
from kernel_suite import rand
from rlk_kernels.ops.linear_logp import portable as linear_portable
from rlk_kernels.ops.logp.operator import logp_ref

OPTIONS = [
    {"softcap": 3.0},
    {"logit_scale": 0.25},
    {"softcap": 2.0, "logit_scale": 0.5, "temperature": 0.7},
]


def logits(t=9, v=333, dtype=torch.float32):
    return 4 * rand(t, v, dtype=dtype, device="cpu", seed=t)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_the_formula(backend, dtype, options):
    x = logits(dtype=dtype).requires_grad_()
    target = torch.tensor([0, 332, 5, -1, 7, 8, 9, 100, 200])
    up = rand(9, dtype=torch.float32, device="cpu", seed=1)
    got = rk.logp(x, target, backend=backend, **options)
    (dx,) = torch.autograd.grad(got, x, up)
    exact = x.detach().double().requires_grad_()
    truth = torch.where(target < 0, 0.0, logp_ref(exact, target.clamp(min=0), **options))
    (dtruth,) = torch.autograd.grad(truth, exact, up.double())
    assert (got - truth).abs().max() < 2e-6
    assert (dx.double() - dtruth).abs().max() < (1e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("options", OPTIONS)
def test_given_and_largest_ids_have_the_bits_of_targets_in_every_batch(options, backend):
    x, target = logits(), torch.arange(9) * 30
    token_ids = torch.stack([target, target + 1], 1)
    whole, id_logp, top, ids = rk.logp(
        x, target, token_ids=token_ids, top_k=3, backend=backend, **options
    )
    assert torch.equal(id_logp[:, 0], whole)
    assert torch.equal(id_logp[:, 1], rk.logp(x, target + 1, backend=backend, **options))
    for t in (0, 4, 8):
        row = slice(t, t + 1)
        assert torch.equal(whole[row], rk.logp(x[row], target[row], backend=backend, **options))
        assert torch.equal(top[row, 2], rk.logp(x[row], ids[row, 2], backend=backend, **options))


@pytest.mark.parametrize("options", OPTIONS)
def test_they_are_the_bits_of_linear_logp(options, backend):
    hidden = rand(9, 16, dtype=torch.bfloat16, device="cpu", seed=3)
    head = 2 * rand(333, 16, dtype=torch.bfloat16, device="cpu", seed=4)
    target = torch.arange(9) * 30
    fused = rk.linear_logp(hidden, head, target, backend=backend, **options)
    x = rk.linear(hidden, head, out_dtype=torch.float32, backend=backend)
    assert torch.equal(rk.logp(x, target, backend=backend, **options), fused)
    assert not torch.equal(rk.logp(x, target, backend=backend), fused)


def test_a_cap_that_comes_after_the_scale_is_noticed(monkeypatch):
    from rlk_kernels.ops.logp import portable

    def other(x, spec):
        z = x.double() * spec.slope
        return spec.softcap * torch.tanh(z / spec.softcap) if spec.softcap else z

    assert portable.final_logits is linear_portable.final_logits
    monkeypatch.setattr(portable, "final_logits", other)
    with pytest.raises(AssertionError):
        test_values_and_gradients_are_those_of_the_formula("torch", torch.float32, OPTIONS[2])


@pytest.mark.parametrize("name", ["softcap", "logit_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_values_that_mean_nothing_are_refused(name, value):
    with pytest.raises(ValueError, match=f"logp: {name}"):
        rk.logp(logits(), torch.arange(9), **{name: value})


def test_capped_logits_have_the_bits_of_a_cap_in_logp(backend):
    x, target = logits(), torch.arange(9) * 30
    capped = rk.softcap(x, 3.0, backend=backend)
    inside = rk.logp(x, target, softcap=3.0, backend=backend)
    assert torch.equal(rk.logp(capped, target, backend=backend), inside)
    assert not torch.equal(rk.logp(x, target, backend=backend), inside)


def test_a_cap_that_is_not_above_0_is_refused():
    with pytest.raises(ValueError, match="cap must be above 0, not 0"):
        rk.softcap(logits(), 0.0)
