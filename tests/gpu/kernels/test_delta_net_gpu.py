"""The gated delta rule on a GPU: against float64, in parts, and its gradient for the widths that
models have."""

import pytest
import rlk_kernels as rk
import torch
from rlk_kernels.ops.delta_rule.operator import gated_delta_rule_ref

LIMIT = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-16}
"""Of the largest magnitude."""
LENGTHS = 70, 0, 5, 192
SHAPES = [(1, 2, 24, 16), (2, 2, 16, 40), (1, 3, 33, 64), (2, 4, 64, 64), (2, 4, 128, 128)]
"""Heads of q and k, heads of v, features of q and k, features of v."""


def rows(shape, lengths, dtype):
    """(q, k, v, g, beta, cu)."""
    hk, hv, d, e = shape
    generator, t = torch.Generator("cuda").manual_seed(sum(shape)), sum(lengths)

    def normal(*size):
        return torch.randn(*size, device="cuda", generator=generator)

    q, k, v = (normal(t, *size).to(dtype) for size in ((hk, d), (hk, d), (hv, e)))
    g, beta = -normal(t, hv).abs() * 0.3, normal(t, hv).sigmoid().to(dtype)
    return q, k, v, g, beta, torch.tensor([0, *lengths], device="cuda").cumsum(0)


def near(value, wanted, limit):
    scale = float(wanted.abs().max())
    return scale > 0 and float((value.double() - wanted).abs().max()) <= limit * scale


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_rule_and_its_gradient_are_those_of_float64(shape, dtype):
    *parts, cu = rows(shape, LENGTHS, dtype)
    leaves = [x.requires_grad_() for x in parts]
    out = rk.gated_delta_rule(*leaves, cu)
    wide = [x.detach().double().requires_grad_() for x in parts]
    exact = gated_delta_rule_ref(*wide, cu)
    do = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, do, retain_graph=True)
    wanted = torch.autograd.grad(exact, wide, do.double())
    again = torch.autograd.grad(out, leaves, do)
    assert near(out.detach(), exact.detach(), 4 * LIMIT[dtype])
    for value, repeat, expected in zip(grads, again, wanted, strict=True):
        assert torch.equal(value, repeat)
        assert near(value, expected, 8 * LIMIT[dtype])


@pytest.mark.parametrize("shape", SHAPES[::2], ids=str)
def test_a_sequences_bits_do_not_depend_on_the_others(shape):
    *parts, cu = rows(shape, LENGTHS, torch.bfloat16)
    both = [x.requires_grad_() for x in parts]
    out = rk.gated_delta_rule(*both, cu)
    do = torch.randn_like(out)
    grads = torch.autograd.grad(out, both, do)
    begin, end = cu[-2:].tolist()
    mine = [x.detach()[begin:end].requires_grad_() for x in parts]
    alone = rk.gated_delta_rule(*mine, cu[-2:] - begin)
    assert torch.equal(alone, out[begin:end])
    for value, whole in zip(torch.autograd.grad(alone, mine, do[begin:end]), grads, strict=True):
        assert torch.equal(value, whole[begin:end])


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("cut", [1, 64, 150])
def test_a_sequence_that_is_cut_has_the_bits_of_the_whole(dtype, cut):
    hk, hv, d, e = shape = (2, 4, 128, 128)
    *parts, cu = rows(shape, (192,), dtype)
    whole = rk.gated_delta_rule(*parts, cu)
    cache = [
        torch.zeros(3, hv, d, e, device="cuda"), parts[0].new_zeros(3, 64, hk, d),
        parts[2].new_zeros(3, 64, hv, e), torch.zeros(3, 64, hv, device="cuda"),
    ]  # fmt: skip
    slot, pieces = torch.tensor([2], device="cuda", dtype=torch.int32), []
    for begin, end in ((0, cut), (cut, cut + 1), (cut + 1, 192)):
        context = torch.tensor([begin], device="cuda", dtype=torch.int32)
        bounds = torch.tensor([0, end - begin], device="cuda", dtype=torch.int32)
        piece = (x[begin:end] for x in parts)
        pieces.append(rk.cached_gated_delta_rule(*piece, *cache, slot, context, bounds))
    assert torch.equal(torch.cat(pieces), whole)
