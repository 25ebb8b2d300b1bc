"""What engines ask of the operators: another's frequencies, results in given memory."""

import pytest
import rlk_kernels as rk
import torch
from kernel_suite import packed, paged_cache, rand


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_by_frequencies_has_the_bits_of_theta(backend, interleaved):
    q, k = (rand(9, h, 24, dtype=torch.float32, device="cpu", seed=h) for h in (3, 1))
    at = torch.arange(9) * 1000
    frequency = torch.tensor([1e4 ** (-2.0 * i / 16) for i in range(8)])
    options = {"interleaved": interleaved, "backend": backend}
    by_theta = rk.rope(q, k, at, theta=1e4, rotary_dim=16, **options)
    rotated = rk.rope(q, k, at, inv_freq=frequency, **options)
    assert all(torch.equal(a, b) for a, b in zip(rotated, by_theta, strict=True))
    other = frequency.clone()
    other.view(torch.int32)[3] += 1  # another library's rounding of one frequency
    assert not torch.equal(rk.rope(q, k, at, inv_freq=other, **options)[0], rotated[0])
    rows = torch.tensor([7, 2])
    lone = rk.rope(q[rows], k[rows], at[rows], inv_freq=frequency, **options)
    assert torch.equal(lone[0], rotated[0][rows])


def test_rope_by_frequencies_turns_gradients_back(backend):
    q = rand(5, 2, 16, dtype=torch.float32, device="cpu", seed=1).requires_grad_()
    frequency = torch.logspace(0, -3, 8)
    y, _ = rk.rope(q, q, torch.arange(5), inv_freq=frequency, backend=backend)
    (back,) = torch.autograd.grad(y, q, y.detach())
    assert float((back - q).abs().max()) < 1e-5


@pytest.mark.parametrize("round_to", [torch.float32, torch.float16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_multiplies_cos_and_sin_before_they_are_rounded(backend, interleaved, round_to):
    """By turning (1, 0) and (0, 1), which gives the table itself."""
    at, frequency = torch.arange(40) * 7, torch.logspace(0, -3, 8)
    first, second = (slice(0, 16, 2), slice(1, 16, 2)) if interleaved else (slice(8), slice(8, 16))
    one = torch.zeros(40, 1, 16)
    one[..., first] = 1.0
    options = {"inv_freq": frequency, "interleaved": interleaved, "backend": backend}
    table = rk.rope(one, one, at, **options)[0]
    factor = torch.tensor([1.1386])
    y, _ = rk.rope(one, one, at, scaling=factor, cos_sin_dtype=round_to, **options)
    for part in (first, second):
        assert torch.equal(y[..., part], (table[..., part] * factor).to(round_to).float())
        assert not torch.equal(y[..., part], table[..., part])
    x = one.clone().requires_grad_()
    y, _ = rk.rope(x, one, at, scaling=factor, **options)
    (back,) = torch.autograd.grad(y, x, y.detach())
    assert float((back - factor.square() * one).abs().max()) < 1e-5


def test_paged_attention_into_given_memory(backend):
    q, k, v, cu_q, cu_k = packed([1, 3], [5, 9], 2, 1, 16, torch.float32, "cpu")
    k_cache, v_cache, table, lens = paged_cache(k, v, cu_k, page=4)
    options = {"cu_seqlens_q": cu_q, "backend": backend, "return_lse": True}
    plain, lse = rk.paged_attention(q, k_cache, v_cache, table, lens, **options)
    memory = torch.full((6, 2, 16), float("nan"))
    out, other = rk.paged_attention(q, k_cache, v_cache, table, lens, out=memory[1:5], **options)
    assert out.data_ptr() == memory[1:].data_ptr()
    assert torch.equal(out, plain)
    assert torch.equal(other, lse)
    assert bool(memory[[0, 5]].isnan().all())  # and nothing beside it
    for wrong in (memory, memory[1:5].half(), memory.view(6, 16, 2).mT[1:5]):
        with pytest.raises(rk.UnsupportedShape, match="out"):
            rk.paged_attention(q, k_cache, v_cache, table, lens, out=wrong, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_linear_into_given_memory(backend, dtype):
    x, weight, bias = (
        rand(*shape, dtype=dtype, device="cpu", seed=i)
        for i, shape in enumerate([(2, 5, 24), (40, 24), (40,)])
    )
    plain = rk.linear(x, weight, bias, backend=backend)
    memory = torch.full((4, 5, 40), float("nan"), dtype=dtype)
    out = rk.linear(x, weight, bias, out=memory[1:3], backend=backend)
    assert out.data_ptr() == memory[1:].data_ptr()
    assert torch.equal(memory[1:3], plain)
    assert bool(memory[[0, 3]].isnan().all())
    wide = torch.empty(2, 5, 40)
    rk.linear(x, weight, bias, out=wide, backend=backend)
    assert torch.equal(wide, rk.linear(x, weight, bias, out_dtype=torch.float32, backend=backend))
    for wrong in (memory, memory[:2].long(), memory.view(4, 40, 5).mT[1:3]):
        with pytest.raises((rk.UnsupportedShape, rk.UnsupportedDtype), match="out"):
            rk.linear(x, weight, bias, out=wrong, backend=backend)
    with pytest.raises(ValueError, match="gradient"):
        rk.linear(x.requires_grad_(), weight, bias, out=memory[1:3], backend=backend)
