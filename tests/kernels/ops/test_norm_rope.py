"""`norm_rope`: the bits of `rms_norm` and `rope`, one after the other, and their gradients."""

import pytest
import rlk_kernels as rk
import torch
from kernel_suite import rand
from rlk_kernels.ops.norm_rope import operator

OPTIONS = [
    {"theta": 1e4},
    {"theta": 1e6, "cast": "vllm", "cos_sin_dtype": torch.bfloat16},
    {"theta": 1e4, "rotary_dim": 8, "interleaved": True, "one_plus": True},
    {"inv_freq": torch.linspace(1, 0.01, 6)},
    {"inv_freq": torch.linspace(1, 0.01, 8), "scaling": torch.tensor([1.1386])},
]


def case(dtype, t=11, dim=16, seed=1):
    qkv = rand(t, 9, dim, dtype=dtype, device="cpu", seed=seed)
    weights = [1 + rand(dim, dtype=dtype, device="cpu", seed=seed + s) for s in (1, 2)]
    return qkv[:, :5], qkv[:, 5:7], *weights, torch.arange(t) * 7919 % 30000


def two(q, k, q_weight, k_weight, positions, *, cast="hf", one_plus=False, backend=None, **options):
    how = {"cast": cast, "one_plus": one_plus, "backend": backend}
    q, k = rk.rms_norm(q, q_weight, 1e-6, **how), rk.rms_norm(k, k_weight, 1e-6, **how)
    return rk.rope(q, k, positions, backend=backend, **options)


def same(dtype, options, backend, dim=16):
    inputs = case(dtype, dim=dim)
    leaves = [[x.clone().requires_grad_() for x in inputs[:4]] for _ in range(2)]
    fused = rk.norm_rope(*leaves[0], inputs[4], eps=1e-6, backend=backend, **options)
    separate = two(*leaves[1], inputs[4], backend=backend, **options)
    plain = rk.norm_rope(*inputs, eps=1e-6, backend=backend, **options)  # of slices, no gradient
    assert all(torch.equal(a, b) for a, b in zip(fused, separate, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(plain, separate, strict=True))
    up = [rand(*x.shape, dtype=dtype, device="cpu", seed=9) for x in fused]
    grads = [torch.autograd.grad(y, x, up) for y, x in zip((fused, separate), leaves, strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS)
def test_they_are_the_bits_of_the_two(backend, options, dtype):
    same(dtype, options, backend)


@pytest.mark.parametrize("dim", [8, 64, 80, 256])
def test_head_sizes(backend, dim):
    same(torch.bfloat16, {"theta": 1e4}, backend, dim)


def test_a_token_has_its_bits_in_every_batch(backend):
    q, k, *weights, positions = case(torch.bfloat16)
    run = {"eps": 1e-6, "theta": 1e4, "backend": backend}
    whole = rk.norm_rope(q, k, *weights, positions, **run)
    for rows in (slice(0, 1), slice(10, 11), slice(3, 9)):
        part = rk.norm_rope(q[rows], k[rows], *weights, positions[rows], **run)
        assert all(torch.equal(a, b[rows]) for a, b in zip(part, whole, strict=True))
    assert rk.norm_rope(q[:0], k[:0], *weights, positions[:0], **run)[0].shape == (0, 5, 16)


def test_a_norm_that_is_rounded_once_less_is_noticed(monkeypatch):
    norm = operator.norm
    monkeypatch.setattr(
        operator, "norm", lambda x, w, eps, **how: norm(x, w, eps, **how | {"cast": "vllm"})
    )
    with pytest.raises(AssertionError):
        same(torch.bfloat16, OPTIONS[0], "torch")


def test_the_registration_passes_torchs_own_check():
    options = (None, None, 1e-6, True, False, 1e4, 16, torch.float32, False, "torch")
    q, k, *rest = case(torch.float32, t=3)
    torch.library.opcheck(operator._norm_rope, (q.clone(), k.clone(), *rest, *options))
