"""Attention over latents: float64 budgets, gradients, and rows whose bits depend on their own keys
alone, in prefill cut anywhere, in decode over any cache, and with chunks that programs divide."""

import pytest
import rlk_kernels as rk
import torch
from kernel_suite import LIMIT, rand
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.ops.latent_attention import kernels, on_triton
from rlk_kernels.ops.latent_attention.operator import latent_attention_ref

H, L, R, SCALE = 3, 24, 8, 0.3
HOW = {"latent": L, "scale": SCALE}
DTYPES = {"torch": torch.bfloat16, "triton": torch.float16}
"""The interpreter's bf16 rounds differently from a GPU's."""


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Of 32 keys, so that a short sequence has several."""
    for module in (kernels, on_triton):
        monkeypatch.setattr(module, "CHUNK", 32)


def rows(queries, keys, dtype, heads=H):
    made = {"dtype": dtype, "device": "cpu"}
    return rand(queries, heads, L + R, seed=1, **made), rand(keys, L + R, seed=2, **made)


def bounds(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def paged(latents, cu, page, width=None):
    """(cache, table, lengths): blocks in a shuffled order, NaN where no key is."""
    lengths = cu.diff()
    counts = [-(-int(n) // page) for n in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(3)).tolist()
    cache = torch.full((sum(counts) + 1, page, L + R), float("nan"), dtype=latents.dtype)
    table = torch.full((len(counts), width or max(counts)), sum(counts), dtype=torch.int32)
    for b, count in enumerate(counts):
        for i in range(count):
            block = table[b, i] = order.pop()
            some = latents[cu[b] + i * page : min(cu[b] + (i + 1) * page, cu[b + 1])]
            cache[block, : len(some)] = some
    return cache, table, lengths


def test_outputs_and_gradients_are_those_of_float64(backend):
    for dtype in (DTYPES[backend], torch.float32):
        cu_q, cu_k = bounds(3, 0, 37), bounds(40, 5, 37)
        leaves = [x.requires_grad_() for x in rows(40, 82, dtype)]
        out, lse = rk.latent_attention(*leaves, cu_q, cu_k, **HOW, return_lse=True, backend=backend)
        do = rand(*out.shape, dtype=dtype, device="cpu", seed=4)
        exact = [x.detach().double().requires_grad_() for x in leaves]
        truth, true_lse = latent_attention_ref(*exact, cu_q, cu_k, **HOW)
        grads = torch.autograd.grad(out, leaves, do)
        true_grads = torch.autograd.grad(truth, exact, do.double())
        for value, wanted in zip((out, lse, *grads), (truth, true_lse, *true_grads), strict=True):
            error = (value.double() - wanted).norm() / wanted.norm()
            assert bool(error <= 2 * LIMIT[dtype])
        again = torch.autograd.grad(
            rk.latent_attention(*leaves, cu_q, cu_k, **HOW, backend=backend), leaves, do
        )
        assert all(map(torch.equal, grads, again))
        assert rk.last_backend("latent_attention") == backend


@pytest.mark.parametrize("cut", [1, 31, 32, 40])
def test_a_prefill_cut_anywhere_has_the_bits_of_the_whole(backend, cut):
    length = 70
    q, latents = rows(length, length, DTYPES[backend])
    whole = rk.latent_attention(q, latents, bounds(length), bounds(length), **HOW, backend=backend)
    first = rk.latent_attention(
        q[:cut], latents[:cut], bounds(cut), bounds(cut), **HOW, backend=backend
    )
    rest = rk.latent_attention(
        q[cut:], latents, bounds(length - cut), bounds(length), **HOW, backend=backend
    )
    assert torch.equal(torch.cat([first, rest]), whole)
    assert not torch.equal(
        whole[cut:], rk.latent_attention(
            q[cut:], latents[cut:], bounds(length - cut), bounds(length - cut), **HOW,
            backend=backend,
        )
    )  # fmt: skip


@pytest.mark.parametrize("page", [4, 16])
def test_decode_over_a_cache_has_the_bits_of_the_whole(backend, page):
    lengths = (70, 9, 33)
    cu = bounds(*lengths)
    q, latents = rows(sum(lengths), sum(lengths), DTYPES[backend])
    whole = rk.latent_attention(q, latents, cu, cu, **HOW, backend=backend)
    cache, table, lens = paged(latents, cu, page, width=40)
    last = cu[1:] - 1
    step = rk.paged_latent_attention(
        q[last], cache, table, lens, cu_seqlens_q=bounds(1, 1, 1), **HOW, backend=backend
    )
    assert torch.equal(step, whole[last])
    alone = rk.paged_latent_attention(
        q[67:70], cache, table[:1], lens[:1], cu_seqlens_q=bounds(3), **HOW, backend=backend
    )
    assert torch.equal(alone, whole[67:70])


@pytest.mark.parametrize("scratch", [1 << 28, 4 * 32 * 80])
def test_programs_that_divide_the_chunks_change_no_bit(monkeypatch, scratch):
    """Also where the scratch has no room for the chunks of some sequences."""
    monkeypatch.setattr(on_triton, "SCRATCH_BYTES", scratch)
    lengths, queries = (70, 9, 97), (5, 1, 2)
    cu_k, cu_q = bounds(*lengths), bounds(*queries)
    q, latents = rows(sum(queries), sum(lengths), torch.float16)
    arguments = q, latents, cu_q.int(), cu_k.int(), None, L, SCALE
    whole = on_triton.forward(*arguments, ways=1)
    for ways in (2, 3, 8):
        assert all(map(torch.equal, on_triton.forward(*arguments, ways=ways), whole))
    assert not torch.equal(whole[0], torch.zeros_like(whole[0]))


def test_what_does_not_fit_is_refused():
    q, latents = rows(4, 4, torch.float32)
    cu = bounds(4)
    with pytest.raises(UnsupportedShape, match="do not fit together"):
        rk.latent_attention(q[..., 1:], latents, cu, cu, **HOW)
    with pytest.raises(UnsupportedShape, match="latents of 32 features with 0 rotated"):
        rk.latent_attention(q, latents, cu, cu, latent=L + R, scale=1.0)
    wide = torch.zeros(4, 1, 1040)
    with pytest.raises(UnsupportedShape, match="are supported"):
        rk.latent_attention(wide, wide[:, 0], cu, cu, latent=1024, scale=1.0)
    with pytest.raises(UnsupportedDtype, match="one floating dtype"):
        rk.latent_attention(q, latents.half(), cu, cu, **HOW)
    with pytest.raises(ValueError, match="scale must be above 0"):
        rk.latent_attention(q, latents, cu, cu, latent=L, scale=0.0)
    with pytest.raises(UnsupportedShape, match="block_table"):
        rk.paged_latent_attention(q, latents, cu[None], cu[1:], cu_seqlens_q=cu, **HOW)
