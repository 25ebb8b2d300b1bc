"""The losses on a router's logits: right by float64, and NaN of tokens that do not count."""

import rlk_kernels as rk
import torch
from expert_suite import chosen
from kernel_suite import rand
from rlk_kernels.losses.routing.operator import load_balancing_loss_ref, router_z_loss_ref

EXPERTS, TOP_K = 9, 3


def inputs(t: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    logits = rand(t, EXPERTS, dtype=torch.float32, device="cpu", seed=1, scale=3.0)
    return logits, chosen(t, EXPERTS, TOP_K, "skewed", "cpu")


def test_losses_are_those_of_float64():
    logits, ids = inputs()
    for value, truth in (
        (rk.load_balancing_loss(logits, ids), load_balancing_loss_ref(logits, ids)),
        (rk.router_z_loss(logits), router_z_loss_ref(logits)),
    ):
        assert value.dtype == torch.float32
        assert abs(float(value) - float(truth)) <= 2e-7 * float(truth)


def test_load_balancing_is_that_of_transformers():
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    layers = [inputs()[0] * scale for scale in (1.0, 0.3)]
    theirs = load_balancing_loss_func(tuple(layers), EXPERTS, TOP_K)
    together = torch.cat(layers)
    ids = torch.cat([rk.route(x, TOP_K)[1] for x in layers])
    ours = rk.load_balancing_loss(together, ids)
    assert abs(float(ours) - float(theirs)) <= 1e-6 * float(theirs)


def test_gradcheck():
    logits, ids = inputs(6)
    leaf = logits.double().requires_grad_()
    valid = torch.tensor([True, False, True, True, True, False])
    for mask in (None, valid):
        assert torch.autograd.gradcheck(
            lambda z, m=mask: rk.load_balancing_loss(z, ids, m), (leaf,)
        )
        assert torch.autograd.gradcheck(lambda z, m=mask: rk.router_z_loss(z, m), (leaf,))


def test_tokens_that_do_not_count_reach_nobody():
    logits, ids = inputs(40)
    valid = torch.arange(40) % 3 != 0
    bad = torch.where(valid[:, None], logits, float("nan"))
    for loss in (
        lambda z, m: rk.load_balancing_loss(z, ids[: len(z)] if m is not None else ids[valid], m),
        rk.router_z_loss,
    ):
        grads = []
        for values, mask in ((bad, valid), (logits[valid], None)):
            leaf = values.clone().requires_grad_()
            value = loss(leaf, mask)
            value.backward()
            grads.append((value, leaf.grad if mask is None else leaf.grad[valid]))
            assert not bool(leaf.grad.isnan().any())
        assert abs(float(grads[0][0]) - float(grads[1][0])) <= 1e-6
        assert bool(((grads[0][1] - grads[1][1]).abs() <= 1e-7).all())
    assert bool(rk.router_z_loss(logits, torch.zeros(40, dtype=torch.bool)).isnan())


def test_a_token_counted_twice_is_noticed():
    logits, ids = inputs()
    twice = torch.cat([logits, logits[:1]]), torch.cat([ids, ids[:1]])
    truth = load_balancing_loss_ref(logits, ids)
    assert abs(float(rk.load_balancing_loss(*twice)) - float(truth)) > 2e-7 * float(truth)
