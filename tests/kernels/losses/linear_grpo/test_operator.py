"""linear_grpo_loss and the loss behind it, on the CPU: both backends against plain torch."""

import traceback
from dataclasses import replace

import pytest
import rlk_kernels as rk
import torch
from linear_logp_suite import case, error, one_sequence_loss
from rlk_kernels.losses.linear_grpo import kernels, launch, plan, portable
from rlk_kernels.losses.linear_grpo.operator import LOSS_TYPES
from rlk_kernels.ops.linear_logp.operator import linear_logp_ref
from torch.utils._python_dispatch import TorchDispatchMode

B, L, H, V = 3, 50, 32, 210
BACKENDS = ["torch", "triton"]
PAIRS = [("torch", torch.bfloat16), ("torch", torch.float16), ("torch", torch.float32)]
PAIRS += [("triton", torch.float16), ("triton", torch.float32)]
NO_LAUNCH = {"alias", "detach", "empty", "empty_like", "select", "slice", "unbind", "unsqueeze"}
NO_LAUNCH |= {"view", "promote_types"}
"""Operators of torch that launch nothing."""
LIMIT = {torch.bfloat16: 8e-3, torch.float16: 2e-3, torch.float32: 4e-6}


def batch(dtype):
    """(case, everything else as keywords) of three sequences, one of them short."""
    c = case(B * L, H, V, dtype, "cpu", bias=True, temperature=0.8, softcap=9.0)
    r = torch.Generator().manual_seed(7)
    logp = linear_logp_ref(c.hidden, c.weight, c.target, c.bias, **c.options)[0].float()
    mask = (torch.rand(B, L, generator=r) > 0.2).long()
    mask[1, 5:] = 0
    c.target[3] = -100
    mask[0, 3] = 0
    more = {
        "old_logp": (logp + 0.3 * torch.randn(B * L, generator=r)).view(B, L),
        "advantages": torch.randn(B, generator=r),
        "mask": mask,
        "ref_logp": (logp + 0.2 * torch.randn(B * L, generator=r)).view(B, L),
        "beta": 0.1,
        "clip": (0.2, 0.28),
    }
    return c, more


def loss_of(c, backend, hidden, weight, bias, **more):
    """(loss, metrics) of the case's tokens as B sequences of L."""
    hidden, target = hidden.view(B, L, H), c.target.view(B, L)
    return rk.linear_grpo_loss(
        hidden, weight, target, bias=bias, backend=backend, **c.options, **more
    )


def run(c, backend, **more):
    """(loss, metrics, gradients)."""
    leaves = [x.detach().clone().requires_grad_() for x in (c.hidden, c.weight, c.bias)]
    loss, metrics = loss_of(c, backend, *leaves, **more)
    return loss, metrics, torch.autograd.grad(3 * loss, leaves)


def plain(c, loss_type, old_logp, advantages, mask, ref_logp, beta, clip):
    """The same in float64 by autograd."""
    leaves = [x.detach().double().requires_grad_() for x in (c.hidden, c.weight, c.bias)]
    logp = linear_logp_ref(leaves[0], leaves[1], c.target, leaves[2], **c.options)[0].view(B, L)
    ratio, a, m = (logp - old_logp).exp(), advantages[:, None], mask.double()
    value = -torch.min(ratio * a, ratio.clamp(1 - clip[0], 1 + clip[1]) * a)
    d = ref_logp.double() - logp
    value = (value + beta * (d.exp() - 1 - d)) * m
    if loss_type == "grpo":
        loss = (value.sum(1) / m.sum(1).clamp(min=1)).mean()
    elif loss_type == "dr_grpo":
        loss = value.sum() / (B * L)
    else:
        loss = value.sum() / m.sum()
    return loss, logp.detach(), torch.autograd.grad(3 * loss, leaves)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize(("backend", "dtype"), PAIRS)
def test_loss_and_gradients_against_autograd_in_float64(backend, dtype, loss_type):
    c, more = batch(dtype)
    loss, metrics, grads = run(c, backend, loss_type=loss_type, **more)
    expected, logp, exact = plain(c, loss_type, **more)
    assert error(loss, expected) <= 2e-6
    assert error(metrics["logp"], logp.flatten()) <= 1e-4
    for value, truth in zip(grads, exact, strict=True):
        assert error(value, truth) <= LIMIT[dtype] * float(truth.abs().max())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_targets_far_below_and_far_above_the_other_logits(dtype, monkeypatch):
    """Rows whose exponentials are brought to another reference, beside rows that are not."""
    t = 140
    c = case(t, H, V, dtype, "cpu", bias=True)
    c.bias[7], c.bias[200] = -90.0, 70.0  # below and above what one reference reaches
    c.bias[:32] -= 100.0  # a tile of nearly nothing
    c.target[::3], c.target[1::3] = 7, 200
    c.target[2::3] = c.target[2::3] % 60 + 100
    c.bias[200] = torch.where(c.bias[200] > 0, c.bias[200], 0.0)
    advantages = torch.randn(t, generator=torch.Generator().manual_seed(1))

    def grads(leaves, backend):
        loss, _ = one_sequence_loss(c, leaves, backend, advantages.to(leaves[0].dtype))
        return torch.autograd.grad(t * loss, leaves)

    operands = (c.hidden, c.weight, c.bias)
    mine = grads([x.detach().clone().requires_grad_() for x in operands], "triton")
    exact = grads([x.detach().double().requires_grad_() for x in operands], "torch")
    for value, truth in zip(mine, exact, strict=True):
        assert error(value, truth) <= LIMIT[dtype] * float(truth.abs().max())
    monkeypatch.setattr(plan, "CHUNK_BYTES", 128 * V * c.hidden.element_size())
    monkeypatch.setattr(kernels, "REBASE_NODES", 1)
    chunked = grads([x.detach().clone().requires_grad_() for x in operands], "triton")
    assert all(torch.equal(a, b) for a, b in zip(mine[:2], chunked[:2], strict=True))


def test_the_four_losses_differ():
    c, more = batch(torch.float32)
    losses = [float(run(c, "torch", loss_type=kind, **more)[0]) for kind in LOSS_TYPES]
    assert len(set(losses[:3])) == 3
    assert losses[2] == losses[3]  # dapo and ppo: the same mean, other clips by custom


def test_a_hidden_size_of_zero_leaves_the_bias(backend):
    hidden, weight, target = torch.zeros(1, 5, 0), torch.zeros(40, 0), torch.arange(5)
    bias = torch.randn(40, generator=torch.Generator().manual_seed(1)).requires_grad_()
    exact = torch.log_softmax(bias.double(), 0)[target]
    truth = torch.autograd.grad(-exact.mean(), bias)[0]
    loss, metrics = rk.linear_grpo_loss(
        hidden, weight, target[None], None, torch.ones(1), torch.ones(1, 5), bias=bias,
        backend=backend,
    )  # fmt: skip
    assert error(metrics["logp"], exact) <= 1e-6
    assert error(torch.autograd.grad(loss, bias)[0], truth) <= 1e-6
    logp = rk.linear_logp(hidden[0], weight, target, bias=bias, backend=backend)
    assert error(torch.autograd.grad(-logp.mean(), bias)[0], truth) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_chunks_of_tokens_change_no_bit(dtype, monkeypatch):
    c, more = batch(dtype)
    one = run(c, "triton", **more)
    monkeypatch.setattr(plan, "CHUNK_BYTES", 128 * V * c.hidden.element_size())
    two = run(c, "triton", **more)
    assert torch.equal(one[0], two[0])
    assert all(torch.equal(a, b) for a, b in zip(one[2][:2], two[2][:2], strict=True))


def test_logp_has_the_bits_of_linear_logp_with_and_without_gradients(backend):
    c, more = batch(torch.float16)
    with_gradients = run(c, backend, **more)
    with torch.no_grad():
        loss, metrics = loss_of(c, backend, c.hidden, c.weight, c.bias, **more)
    alone = rk.linear_logp(c.hidden, c.weight, c.target, bias=c.bias, backend=backend, **c.options)
    assert torch.equal(metrics["logp"], alone)
    assert torch.equal(with_gradients[1]["logp"], alone)
    assert torch.equal(loss, with_gradients[0])


def test_packed_equals_padded(backend):
    """Sequences without their padding: the same loss, and hidden gradients bit for bit."""
    c, more = batch(torch.float32)
    more["mask"] = (torch.arange(L)[None] < torch.tensor([50, 20, 31])[:, None]).long()
    more["mask"][0, 3] = 0
    loss, metrics, grads = run(c, backend, **more)
    keep = (torch.arange(L)[None] < torch.tensor([50, 20, 31])[:, None]).flatten()
    hidden = c.hidden[keep].clone().requires_grad_()
    per_token = {name: more[name].flatten()[keep] for name in ("old_logp", "mask", "ref_logp")}
    value, packed = rk.linear_grpo_loss(
        hidden, c.weight, c.target[keep], advantages=more["advantages"], bias=c.bias,
        cu_seqlens=torch.tensor([0, 50, 70, 101]), beta=0.1, clip=more["clip"], backend=backend,
        **per_token, **c.options,
    )  # fmt: skip
    assert error(value, loss) < 1e-7
    assert torch.equal(packed["logp"], metrics["logp"][keep])
    assert torch.equal(torch.autograd.grad(3 * value, hidden)[0], grads[0][keep])


def test_metrics_say_what_they_name(backend):
    c, more = batch(torch.float32)
    _, metrics, _ = run(c, backend, **more)
    on = more["mask"].bool().flatten()
    logp = metrics["logp"].double()
    log_ratio = (logp - more["old_logp"].flatten().double())[on]
    ratio = log_ratio.exp()
    a = more["advantages"].repeat_interleave(L)[on]
    low, high = (ratio < 0.8) & (a < 0), (ratio > 1.28) & (a > 0)
    expected = {
        "tokens": on.sum(), "clip_fraction": (low | high).double().mean(),
        "clip_low_fraction": low.double().mean(), "clip_high_fraction": high.double().mean(),
        "k1": -log_ratio.mean(), "k3": (ratio - 1 - log_ratio).mean(),
        "ratio_mean": ratio.mean(), "ratio_min": ratio.min(), "ratio_max": ratio.max(),
        "logp_mean": logp[on].mean(),
        "ref_k3": ((d := more["ref_logp"].flatten().double()[on] - logp[on]).exp() - 1 - d).mean(),
    }  # fmt: skip
    assert set(metrics) == {*expected, "logp"}
    assert float(metrics["clip_low_fraction"]) > 0
    assert float(metrics["clip_high_fraction"]) > 0
    for name, value in expected.items():
        assert error(metrics[name], value) < 2e-6, name


def test_what_is_masked_out_may_hold_anything(backend):
    c, more = batch(torch.float32)
    loss, _, grads = run(c, backend, **more)
    out = more["mask"] == 0
    for name in ("old_logp", "ref_logp"):
        more[name] = more[name].masked_fill(out, float("nan"))
    repeated, _, others = run(c, backend, **more)
    assert torch.equal(loss, repeated)
    assert bool(loss.isfinite())
    assert all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))
    assert bool((grads[0].view(B, L, H)[out] == 0).all())


def test_on_policy_without_old_logp_and_a_mask_of_zeros(backend):
    c, more = batch(torch.float32)
    more["old_logp"] = None
    _, metrics, grads = run(c, backend, **more)
    assert float(metrics["ratio_mean"]) == 1.0
    assert float(metrics["k3"]) == 0.0
    assert bool((grads[1] != 0).any())
    more["mask"] = torch.zeros(B, L)
    loss, metrics, grads = run(c, backend, **more)
    assert float(loss) == 0.0
    none = torch.zeros(B, 0)
    loss, of_none = rk.linear_grpo_loss(
        torch.zeros(B, 0, H), c.weight, none.long(), None, more["advantages"], none, ref_logp=none,
        backend=backend,
    )  # fmt: skip
    assert float(loss) == 0.0
    assert set(of_none) == set(metrics)
    assert all(bool((g == 0).all()) for g in grads)


def test_a_second_backward_is_an_error_and_not_a_wrong_gradient():
    c, more = batch(torch.float32)
    hidden = c.hidden.clone().requires_grad_()
    loss, _ = loss_of(c, "torch", hidden, c.weight, None, **more)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second"):
        loss.backward()


class _Undefined(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return None


def test_a_loss_that_nothing_flows_into_gives_no_gradient(backend):
    c, more = batch(torch.float32)
    hidden = c.hidden.clone().requires_grad_()
    loss, _ = loss_of(c, backend, hidden, c.weight, None, **more)
    (_Undefined.apply(loss) + 0 * hidden.sum()).backward()
    assert bool((hidden.grad == 0).all())


def test_gradients_are_made_only_where_they_can_be_asked_for(backend, monkeypatch):
    c, more = batch(torch.float32)
    exact = run(c, backend, **more)[0]
    monkeypatch.setattr(launch, "logp_and_gradients", None)
    monkeypatch.setattr(portable.linear_logp, "backward", None)
    weight = c.weight.clone().requires_grad_()
    with torch.no_grad():
        loss, _ = loss_of(c, backend, c.hidden, weight, c.bias, **more)
    assert torch.equal(loss, exact)


def test_advantages_of_two_dimensions_are_one_a_token(backend):
    """As many tokens as sequences, one of these empty."""
    c = case(3, H, V, torch.float32, "cpu")
    loss, _ = rk.linear_grpo_loss(
        c.hidden, c.weight, c.target, None, torch.tensor([[1.0], [10.0], [100.0]]), torch.ones(3),
        cu_seqlens=torch.tensor([0, 0, 2, 3]), loss_type="dapo", backend=backend,
    )  # fmt: skip
    assert float(loss) == -37.0


@pytest.mark.parametrize("stale", [95.0, 800.0])
def test_an_advantage_of_zero_has_no_gradient_however_stale_the_old_policy(backend, stale):
    """exp overflows in fp32, then in float64."""
    c, more = batch(torch.float32)
    old_logp = more["old_logp"].clone()
    old_logp[2, 1] -= stale
    more["mask"][2, 1] = 1
    advantages = torch.tensor([0.7, -1.0, 0.0])
    change = {"advantages": advantages, "old_logp": old_logp, "beta": 0.0, "ref_logp": None}
    loss, metrics, grads = run(c, backend, **{**more, **change})
    assert float(metrics["ratio_max"]) == float("inf")
    assert all(bool(x.isfinite().all()) for x in (loss, *grads))
    assert bool((grads[0][2 * L :] == 0).all())


def test_ids_of_32_bits_know_an_ignore_index_of_64(backend):
    c, more = batch(torch.float32)
    ids = c.target.clamp(min=0).int()
    some = {**more, "ignore_index": -(2**40)}
    assert float(run(replace(c, target=ids), backend, **some)[1]["tokens"]) > 0
    logp = rk.linear_logp(c.hidden, c.weight, 0 * ids, ignore_index=-(2**40), backend=backend)
    assert bool((logp != 0).all())


def test_without_beta_a_reference_of_nan_touches_its_metric_alone():
    c, more = batch(torch.float32)
    more |= {"beta": 0.0, "ref_logp": torch.full((B, L), float("nan"))}
    for backend in BACKENDS:
        loss, metrics, grads = run(c, backend, **more)
        assert bool(metrics["ref_k3"].isnan())
        assert all(bool(x.isfinite().all()) for x in (loss, *grads))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_numbers_times_a_factor_and_rows_times_theirs(dtype):
    x = torch.randn(5 * 64 + 3, generator=torch.Generator().manual_seed(1)).to(dtype)
    for factor in (1.0, 3.1):
        scaled = x.clone()
        kernels._scale_kernel[(2,)](scaled, torch.tensor(factor), x.numel(), 64)
        assert torch.equal(scaled, (x.float() * factor).to(dtype))
    wide = torch.randn(13, 530, generator=torch.Generator().manual_seed(2)).to(dtype)
    rows, c = wide[:, :515], torch.randn(13, generator=torch.Generator().manual_seed(3))
    expected = torch.mul(rows, c[:, None], out=torch.empty_like(rows))
    assert torch.equal(kernels.scale_rows(rows, c, torch.empty_like(rows)), expected)
    kernels.scale_rows(rows, c, rows)
    assert torch.equal(rows, expected)


class Names(TorchDispatchMode):
    """The torch operators that run below it, but for Triton's interpreter's and `Spec.inverse`'s
    (a number of the host)."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        codes = [frame.f_code for frame, _ in traceback.walk_stack(None)]
        if not any("/triton/runtime/" in x.co_filename or x.co_name == "inverse" for x in codes):
            self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_triton_backend_leaves_no_arithmetic_to_torch(loss_type):
    c, more = batch(torch.float16)
    leaves = [x.clone().requires_grad_() for x in (c.hidden.view(B, L, H), c.weight)]
    with Names() as dispatched:
        loss, _ = rk.linear_grpo_loss(
            leaves[0], leaves[1], c.target.view(B, L), backend="triton", loss_type=loss_type, **more
        )
        torch.autograd.grad(loss, leaves)
    launching = dispatched.names - NO_LAUNCH
    assert launching <= {"ones_like"}, launching  # autograd's own upstream gradient
