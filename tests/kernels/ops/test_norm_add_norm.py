"""`norm_add_norm`: the bits of two norms, the second of which adds the residual."""

import pytest
import rlk_kernels as rk
import torch
from kernel_suite import rand
from rlk_kernels import launching
from rlk_kernels.ops.norm_add_norm import operator

OPTIONS = [{}, {"cast": "vllm"}, {"cast": "vllm", "one_plus": True}]


def case(dtype, rows=11, width=96, weight_dtype=None):
    """x and residual [rows, width] with rows that are apart, and two weights."""
    apart = rand(rows, 2 * width + 8, dtype=dtype, device="cpu", seed=1)
    weights = [rand(width, dtype=weight_dtype or dtype, device="cpu", seed=s) for s in (2, 3)]
    return apart[:, 8 : 8 + width], apart[:, -width:], *weights


def two(x, residual, branch_weight, weight, eps=1e-6, **options):
    branch = rk.rms_norm(x, branch_weight, eps, **options)
    return rk.rms_norm(branch, weight, eps, residual=residual, **options)


def check(inputs, **options):
    fused = rk.norm_add_norm(*inputs, 1e-6, **options)
    pairs = zip(fused, two(*inputs, **options), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS)
def test_they_are_the_bits_of_the_two(backend, options, dtype):
    check(case(dtype), backend=backend, **options)
    check(case(dtype, weight_dtype=torch.float32), backend=backend, **options)


@pytest.mark.parametrize(
    ("dtype", "cast", "launches"),
    [(torch.bfloat16, "vllm", 1), (torch.bfloat16, "hf", 2), (torch.float32, "vllm", 2)],
)
def test_a_launch_less_where_the_product_is_wider_than_the_norm(dtype, cast, launches):
    before = launching._thread.launches
    rk.norm_add_norm(*case(dtype), 1e-6, cast=cast, backend="triton")
    assert launching._thread.launches - before == launches


@pytest.mark.parametrize("width", [1, 33, 1024, 2560])
def test_widths_and_leading_dimensions(backend, width):
    inputs = case(torch.bfloat16, rows=6, width=width)
    check(inputs, cast="vllm", backend=backend)
    rows = [x.unflatten(0, (2, 3)) for x in inputs[:2]]
    check((*rows, *inputs[2:]), cast="vllm", backend=backend)


def test_a_row_has_its_bits_in_every_batch(backend):
    x, residual, *weights = case(torch.bfloat16)
    run = {"eps": 1e-6, "cast": "vllm", "backend": backend}
    whole = rk.norm_add_norm(x, residual, *weights, **run)
    for rows in (slice(0, 1), slice(10, 11), slice(3, 9)):
        part = rk.norm_add_norm(x[rows], residual[rows], *weights, **run)
        assert all(torch.equal(a, b[rows]) for a, b in zip(part, whole, strict=True))
    assert rk.norm_add_norm(x[:0], residual[:0], *weights, **run)[0].shape == (0, 96)


def test_a_branch_that_is_not_rounded_is_noticed(monkeypatch):
    norm = operator.norm

    def unrounded(x, weight, eps, *, residual=None, **how):
        if residual is None:
            return norm(x.float(), weight.float(), eps, **how)
        total = (x + residual.float()).to(residual.dtype)
        return norm(total, weight, eps, **how), total

    monkeypatch.setattr(operator, "norm", unrounded)
    with pytest.raises(AssertionError):
        check(case(torch.bfloat16), backend="torch")


def test_a_backward_is_refused():
    x, *rest = case(torch.float32)
    y, _ = rk.norm_add_norm(x.clone().requires_grad_(), *rest, 1e-6)
    with pytest.raises(NotImplementedError, match="norm_add_norm: it has no gradient"):
        y.sum().backward()


def test_the_registration_passes_torchs_own_check():
    x, residual, *weights = case(torch.float32, rows=3)
    inputs = (x.clone(), residual.clone(), *weights, 1e-6, True, False, "torch")
    torch.library.opcheck(operator._norm_add_norm, inputs)
