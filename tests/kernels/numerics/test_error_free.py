"""The arithmetic under the portable backend: error-free splitting and elementary functions."""

import math

import pytest
import torch
from rlk_kernels.numerics import elementary
from rlk_kernels.numerics.error_free import matmul_nt, pow2
from rlk_kernels.numerics.rows import tree_sum


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_product_does_not_depend_on_the_order_of_k(dtype):
    a, b = torch.randn(9, 777).to(dtype), torch.randn(5, 777).to(dtype)
    whole = matmul_nt(a, b)
    for seed in range(5):
        order = torch.randperm(777, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(matmul_nt(a[:, order], b[:, order]), whole)


def test_a_float32_product_does_depend_on_the_order_of_k():
    """The control group of the test above."""
    a, b = torch.randn(9, 777), torch.randn(5, 777)
    order = torch.randperm(777)
    assert not torch.equal(a[:, order] @ b[:, order].T, a @ b.T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("outlier", [1.0, 1000.0])
def test_the_product_is_as_good_as_a_float32_one(dtype, outlier):
    a, b = torch.randn(64, 4096), torch.randn(96, 4096)
    a[:, 17] *= outlier
    a, b = a.to(dtype), b.to(dtype)
    truth = a.double() @ b.double().T
    error = (matmul_nt(a, b) - truth).abs().max()
    float32_error = (a.float() @ b.float().T - truth).abs().max()
    assert error <= float32_error * (1 if outlier == 1 else 64)


def test_infinities_and_nans_stay_in_their_rows():
    a, b = torch.randn(4, 8), torch.randn(3, 8)
    a[1, 2], a[2, 3] = math.inf, math.nan
    out = matmul_nt(a, b)
    assert bool(out[[0, 3]].isfinite().all())
    assert not bool(out[1].isfinite().any())
    assert bool(out[2].isnan().all())
    assert torch.equal(out[[0, 3]], matmul_nt(a[[0, 3]], b))


def test_pow2_and_tree_sum():
    n = torch.arange(-1022, 1024)
    assert torch.equal(pow2(n), torch.tensor([2.0**i for i in n.tolist()], dtype=torch.float64))
    for size in (0, 1, 2, 3, 7, 1000):
        x = torch.randn(3, size, dtype=torch.float64)
        assert torch.allclose(tree_sum(x), x.sum(-1, keepdim=True), atol=1e-12)


def test_elementary_functions():
    x = torch.linspace(-80, 80, 100001, dtype=torch.float64)
    assert float(((elementary.exp(x) - x.exp()) / x.exp()).abs().max()) < 2.0**-45
    assert elementary.exp(torch.tensor([-math.inf])).float().item() == 0
    assert elementary.exp(torch.tensor([math.nan])).isnan().all()
    y = torch.logspace(-30, 30, 100001, dtype=torch.float64)
    assert float((elementary.log(y) - y.log()).abs().max()) < 1e-13
    assert elementary.log(torch.tensor([0.0])).item() == -math.inf
    angle = torch.linspace(-1.5e6, 1.5e6, 300001, dtype=torch.float64)
    sin, cos = elementary.sin_cos(angle)
    assert float((sin - angle.sin()).abs().max()) < 1e-15
    assert float((cos - angle.cos()).abs().max()) < 1e-15


def test_elementary_functions_do_not_depend_on_the_place_in_the_tensor():
    x = torch.randn(40001)
    for f in (elementary.exp, elementary.sigmoid):
        whole = f(x)
        for first, last in ((0, 1), (3, 17), (40000, 40001), (1, 40001)):
            assert torch.equal(f(x[first:last]), whole[first:last])
