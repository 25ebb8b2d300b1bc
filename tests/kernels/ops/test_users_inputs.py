"""Strided, empty and unusual inputs of single operators: each is computed right or refused."""

import pytest
import rlk_kernels as rk
import torch
from kernel_suite import rand

T, H, V = 5, 13, 37


def of(*shape, seed=0):
    return rand(*shape, dtype=torch.float32, device="cpu", seed=seed)


X, W, HEAD, BIAS, GAIN = of(T, H), of(V, H), of(V, H, seed=1), of(V), of(H)
Q, K = of(T, 4, 8), of(T, 2, 8, seed=1)
CU, IDS = torch.tensor([0, 2, T]), torch.arange(T)
CACHE, TABLE, LENS = of(4, 4, 2, 8), torch.tensor([[0, 1], [2, 3]]), torch.tensor([7, 5])


def test_paged_attention_has_no_gradient_and_says_so(backend):
    options = {"cu_seqlens_q": torch.tensor([0, 2, T]), "backend": backend}
    q = Q.clone().requires_grad_()
    for more in ({}, {"softcap": 5.0}):
        y = rk.paged_attention(q, CACHE, CACHE, TABLE, LENS, **options, **more)
        with pytest.raises(NotImplementedError, match="paged_attention: it has no gradient"):
            y.sum().backward()
        with pytest.raises(ValueError, match="no_grad"):
            rk.paged_attention(q, CACHE, CACHE, TABLE, LENS, out=Q.clone(), **options, **more)
        with torch.no_grad():
            out = torch.empty_like(Q)
            rk.paged_attention(q, CACHE, CACHE, TABLE, LENS, out=out, **options, **more)
        assert torch.equal(out, y)


def test_linear_reads_a_bias_of_any_stride(backend):
    dense = rk.linear(X, W, BIAS, backend=backend)
    for bias in (torch.stack([BIAS, -BIAS], 1)[:, 0], torch.cat([BIAS, BIAS])[V:]):
        assert torch.equal(rk.linear(X, W, bias, backend=backend), dense)
    one = BIAS[:1].expand(V)
    assert torch.equal(
        rk.linear(X, W, one, backend=backend), rk.linear(X, W, one.clone(), backend=backend)
    )


@pytest.mark.parametrize(("rows", "columns"), [(0, 4), (3, 0), (0, 0)])
def test_linear_without_rows_or_columns(backend, rows, columns):
    x, weight, bias = of(rows, H), of(columns, H), of(columns)
    out = torch.empty(rows, columns)
    assert rk.linear(x, weight, bias, out=out, backend=backend) is out
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    rk.linear(*leaves, backend=backend).sum().backward()
    assert all(torch.equal(t.grad, torch.zeros_like(t)) for t in leaves)


def test_a_norm_takes_a_whole_number_for_eps(backend):
    """Triton makes a constant of a 1, and a kernel that is launched again would keep it."""
    normed = rk.rms_norm(X, GAIN, 1, backend=backend)
    assert torch.equal(normed, rk.rms_norm(X, GAIN, 1.0, backend=backend))
    assert torch.equal(normed, rk.rms_norm(X, GAIN, torch.tensor(1.0), backend=backend))
