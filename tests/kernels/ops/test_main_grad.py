"""`linear(main_grad=)`: the weight's gradient added in fp32, one addition an element."""

import pytest
import rlk_kernels as rk
import torch
from kernel_suite import rand
from rlk_kernels.matmul import portable

DTYPES = [torch.float32, torch.bfloat16]


def case(dtype, m=37, n=24, k=40):
    x = rand(m, k, dtype=dtype, device="cpu", seed=1).requires_grad_()
    weight = rand(n, k, dtype=dtype, device="cpu", seed=2).requires_grad_()
    dy = rand(m, n, dtype=dtype, device="cpu", seed=3)
    return x, weight, dy, rand(n, k, dtype=torch.float32, device="cpu", seed=4)


def product(dy, x, backend):
    """dy^T @ x in fp32, by the operator itself."""
    x, dy = x.detach(), dy.detach()
    return rk.linear(dy.mT.contiguous(), x.mT.contiguous(), out_dtype=torch.float32,
                     backend=backend)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_backward_adds_its_fp32_product_once(backend, dtype):
    x, weight, dy, main_grad = case(dtype)
    before, one = main_grad.clone(), product(dy, x, backend)
    bias = torch.zeros(24, dtype=dtype, requires_grad=True)
    for expected in (before + one, before + one + one):
        x.grad = bias.grad = None
        y = rk.linear(x, weight, bias, main_grad=main_grad, backend=backend)
        y.backward(dy)
        assert torch.equal(main_grad, expected)
    assert weight.grad is None
    plain = rk.linear(x, weight, bias, backend=backend)
    assert torch.equal(plain, y)
    grads = torch.autograd.grad(plain, (x, bias), dy)
    assert torch.equal(x.grad, grads[0])
    assert torch.equal(bias.grad, grads[1])
    exact = dy.double().mT @ x.detach().double()
    assert (one - exact).abs().max() < 1e-5


def test_forwards_may_come_before_the_backwards(backend):
    """Pipelined micro-batches: another backward adds to main_grad in between."""
    x, weight, dy, main_grad = case(torch.bfloat16)
    parts = [(x[:20], dy[:20]), (x[20:], dy[20:])]
    expected = main_grad.clone()
    for part, up in parts:
        expected = expected + product(up, part, backend)
    ys = [rk.linear(part, weight, main_grad=main_grad, backend=backend) for part, _ in parts]
    for y, (_, up) in zip(ys, parts, strict=True):
        y.backward(up)
    assert torch.equal(main_grad, expected)


def test_rows_of_zeros_behind_the_last_change_no_bit(backend):
    x, weight, dy, main_grad = case(torch.bfloat16)
    padded = main_grad.clone()
    rk.linear(x, weight, main_grad=main_grad, backend=backend).backward(dy)
    more = [torch.cat([t.detach(), torch.zeros_like(t[:27])]) for t in (x, dy)]
    rk.linear(more[0], weight, main_grad=padded, backend=backend).backward(more[1])
    assert torch.equal(main_grad, padded)


def test_a_gradient_that_is_rounded_first_is_noticed(monkeypatch):
    run = portable.product
    monkeypatch.setattr(
        portable, "product", lambda a, b, bias, trans_a, trans_b, dtype:
        run(a, b, bias, trans_a, trans_b, a.dtype if trans_a else dtype).to(dtype),
    )  # fmt: skip
    with pytest.raises(AssertionError):
        test_each_backward_adds_its_fp32_product_once("torch", torch.bfloat16)
