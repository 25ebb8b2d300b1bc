"""Gradients on the CPU: gradcheck in float64, the budget rule, and the same bits every time."""

import pytest
import rlk_kernels as rk
import torch
from kernel_suite import LIMIT

CU_Q, CU_K = torch.tensor([0, 2, 6]), torch.tensor([0, 4, 9])
IDS = torch.tensor([3, 0, 3, 3, 1])
TARGET = torch.tensor([0, 6, -100, 2, 2])
POSITIONS = torch.tensor([0, 5, 9, 1000, 3])


def leaf(*shape, dtype, seed):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(dtype).requires_grad_()


def _groups(backend):
    ids = torch.tensor([[0, 2], [1, 3], [0, 1], [2, 3], [1, 4]], dtype=torch.int32)  # one dropped
    return rk.group_by_expert(ids, 4, backend=backend)


def _slots(dtype):
    scales = torch.tensor([2.0, 0.3], dtype=torch.promote_types(dtype, torch.float32))
    return scales, torch.tensor([1, 0, -1, 1, 2])


def cases(dtype):
    """name -> (function of (backend, *leaves), leaves)."""
    return {
        "linear": (
            lambda b, x, w, c: rk.linear(x, w, c, backend=b),
            [leaf(5, 7, dtype=dtype, seed=1), leaf(4, 7, dtype=dtype, seed=2),
             leaf(4, dtype=dtype, seed=3)],
        ),
        "add_lora": (
            lambda b, x, y, a, c: rk.add_lora(x, y, a, c, *_slots(x.dtype), backend=b),
            [leaf(5, 7, dtype=dtype, seed=1), leaf(5, 4, dtype=dtype, seed=2),
             leaf(2, 3, 7, dtype=dtype, seed=3), leaf(2, 4, 3, dtype=dtype, seed=4)],
        ),
        "rms_norm": (
            lambda b, x, w: rk.rms_norm(x, w, 1e-6, cast="vllm", backend=b),
            [leaf(5, 7, dtype=dtype, seed=1), leaf(7, dtype=dtype, seed=2)],
        ),
        "rms_norm_residual": (
            lambda b, x, r, w: torch.cat(
                rk.rms_norm(x, w, 1e-6, residual=r, cast="vllm", backend=b)
            ),
            [leaf(5, 7, dtype=dtype, seed=1), leaf(5, 7, dtype=dtype, seed=2),
             leaf(7, dtype=dtype, seed=3)],
        ),
        "rms_norm_one_plus": (
            lambda b, x, w: rk.rms_norm(x, w, 1e-6, cast="vllm", one_plus=True, backend=b),
            [leaf(5, 7, dtype=dtype, seed=1), leaf(7, dtype=dtype, seed=2)],
        ),
        "rope": (
            lambda b, q, k: torch.cat(
                rk.rope(q, k, POSITIONS, theta=1e4, rotary_dim=4, backend=b), 1
            ),
            [leaf(5, 2, 6, dtype=dtype, seed=1), leaf(5, 1, 6, dtype=dtype, seed=2)],
        ),
        "swiglu": (
            lambda b, g, u: rk.swiglu(g, u, backend=b),
            [leaf(5, 7, dtype=dtype, seed=1), leaf(5, 7, dtype=dtype, seed=2)],
        ),
        "geglu": (
            lambda b, g, u: rk.swiglu(g, u, activation="gelu_tanh", backend=b),
            [leaf(5, 7, dtype=dtype, seed=1), leaf(5, 7, dtype=dtype, seed=2)],
        ),
        "clamped_swiglu": (
            lambda b, g, u: rk.clamped_swiglu(g, u, alpha=1.7, limit=0.9, backend=b),
            [leaf(5, 7, dtype=dtype, seed=1), leaf(5, 7, dtype=dtype, seed=2)],
        ),
        "relu2": (
            lambda b, x: rk.activation(x, "relu2", backend=b), [leaf(5, 7, dtype=dtype, seed=1)],
        ),
        "gelu": (
            lambda b, x: rk.activation(x, "gelu_tanh", backend=b),
            [leaf(5, 7, dtype=dtype, seed=1)],
        ),
        "layer_norm": (
            lambda b, x, w, c: rk.layer_norm(x, w, 1e-6, c, backend=b),
            [leaf(5, 7, dtype=dtype, seed=1), leaf(7, dtype=dtype, seed=2),
             leaf(7, dtype=dtype, seed=3)],
        ),
        "grouped_linear": (
            lambda b, x, w, c: rk.grouped_linear(x, w, _groups(b), c, backend=b),
            [leaf(5, 7, dtype=dtype, seed=1), leaf(4, 6, 7, dtype=dtype, seed=2),
             leaf(4, 6, dtype=dtype, seed=3)],
        ),
        "softcap": (
            lambda b, x: rk.softcap(x, 2.0, backend=b), [leaf(5, 7, dtype=dtype, seed=1)],
        ),
        "embedding": (
            lambda b, w: rk.embedding(IDS, w, backend=b), [leaf(6, 7, dtype=dtype, seed=1)],
        ),
        "logp": (
            lambda b, x: rk.logp(x, TARGET, temperature=0.7, backend=b),
            [leaf(5, 7, dtype=dtype, seed=1)],
        ),
        "attention": (
            lambda b, q, k, v: rk.attention(q, k, v, CU_Q, CU_K, window=3, backend=b),
            [leaf(6, 4, 4, dtype=dtype, seed=1), leaf(9, 2, 4, dtype=dtype, seed=2),
             leaf(9, 2, 4, dtype=dtype, seed=3)],
        ),
    }  # fmt: skip


NAMES = list(cases(torch.float64))


@pytest.mark.parametrize("name", NAMES)
def test_gradcheck(name):
    run, leaves = cases(torch.float64)[name]
    assert torch.autograd.gradcheck(lambda *x: run("torch", *x), leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_low_precision_gradients_agree_with_float64_and_repeat(name, dtype, backend):
    run, leaves = cases(dtype)[name]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact = run("torch", *wide)
    dy = torch.randn(exact.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    truth = torch.autograd.grad(exact, wide, dy.double())
    out = run(backend, *leaves)
    first = torch.autograd.grad(out, leaves, dy.to(out.dtype), retain_graph=True)
    repeats = torch.autograd.grad(out, leaves, dy.to(out.dtype))
    for value, repeat, expected in zip(first, repeats, truth, strict=True):
        assert torch.equal(value, repeat)
        assert value.dtype == dtype
        limit = 8 * LIMIT[dtype] * (float(expected.abs().max()) + 1e-6)
        error = (value.double() - expected).abs()
        assert error.numel() > 0
        assert bool((error <= limit).all())


def test_a_graph_of_linears_gradients_is_made_and_their_own_are_refused():
    x, w = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    once = torch.autograd.grad(rk.linear(x, w).sum(), x, create_graph=True)[0]
    assert torch.equal(once, w.detach().sum(0).expand(3, 4))
    with pytest.raises(NotImplementedError, match="linear"):
        torch.autograd.grad(once.sum(), w)
