"""Attention over latents on a GPU, with the widths of DeepSeek-V3: float64 budgets, and the bits of
decode, of a prefill cut anywhere, and of chunks that programs divide."""

import pytest
import rlk_kernels as rk
import torch
from kernel_suite import LIMIT, rand
from rlk_kernels.integrations import profile
from rlk_kernels.ops.latent_attention import on_triton
from rlk_kernels.ops.latent_attention.operator import latent_attention_ref

L, R, SCALE = 512, 64, 0.07
HOW = {"latent": L, "scale": SCALE}
HEADS = (128, 20, 4)


def rows(queries, keys, heads, dtype=torch.bfloat16):
    made = {"dtype": dtype, "device": "cuda"}
    return rand(queries, heads, L + R, seed=1, **made), rand(keys, L + R, seed=2, **made)


def bounds(*lengths):
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def paged(latents, lengths, page):
    """(cache, table): blocks in a shuffled order, NaN where no key is."""
    counts = [-(-n // page) for n in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(3)).tolist()
    cache = latents.new_full((sum(counts) + 1, page, L + R), float("nan"))
    table = torch.full((len(counts), max(counts)), sum(counts), dtype=torch.int32)
    begin = 0
    for b, count in enumerate(counts):
        for i in range(count):
            block = table[b, i] = order.pop()
            some = latents[begin + i * page : begin + min((i + 1) * page, lengths[b])]
            cache[block, : len(some)] = some
        begin += lengths[b]
    return cache, table.cuda()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("heads", HEADS)
def test_outputs_and_gradients_are_those_of_float64(heads, dtype):
    lengths = (700, 33) if heads < 128 else (300, 33)
    cu = bounds(*lengths)
    leaves = [x.requires_grad_() for x in rows(sum(lengths), sum(lengths), heads, dtype)]
    out, lse = rk.latent_attention(*leaves, cu, cu, **HOW, return_lse=True)
    assert rk.last_backend("latent_attention") == "triton"
    do = rand(*out.shape, dtype=dtype, device="cuda", seed=4)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    truth, true_lse = latent_attention_ref(*exact, cu, cu, **HOW)
    grads = torch.autograd.grad(out, leaves, do)
    true_grads = torch.autograd.grad(truth, exact, do.double())
    for value, wanted in zip((out, lse, *grads), (truth, true_lse, *true_grads), strict=True):
        assert bool(value.isfinite().all())
        error = (value.double() - wanted).norm() / wanted.norm()
        assert bool(error <= 2 * LIMIT[dtype]), error
    again = torch.autograd.grad(rk.latent_attention(*leaves, cu, cu, **HOW), leaves, do)
    assert all(map(torch.equal, grads, again))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("page", [16, 64])
def test_decode_and_cut_prefills_have_the_bits_of_the_whole(heads, page):
    lengths = (1500, 40, 513)
    cu = bounds(*lengths)
    q, latents = rows(sum(lengths), sum(lengths), heads)
    whole = rk.latent_attention(q, latents, cu, cu, **HOW)
    cache, table = paged(latents, lengths, page)
    for counts in ((1, 1, 1), (3, 1, 2), (700, 40, 1), (1, 5, 200)):
        last = [int(end) - n + i for end, n in zip(cu[1:], counts, strict=True) for i in range(n)]
        step = rk.paged_latent_attention(
            q[last], cache, table, torch.tensor(lengths, device="cuda"),
            cu_seqlens_q=bounds(*counts), **HOW,
        )  # fmt: skip
        assert torch.equal(step, whole[last]), counts
    for context in (1, 64, 511, 512, 513, 1024, 1499):
        one = rk.paged_latent_attention(
            q[context - 1 : context], cache, table[:1], bounds(context)[1:],
            cu_seqlens_q=bounds(1), **HOW,
        )  # fmt: skip
        assert torch.equal(one, whole[context - 1 : context]), context


@pytest.mark.parametrize("scratch", [1 << 28, 1 << 22])
def test_programs_that_divide_the_chunks_change_no_bit(monkeypatch, scratch):
    monkeypatch.setattr(on_triton, "SCRATCH_BYTES", scratch)
    lengths, queries = (3000, 900, 5000), (5, 1, 2)
    q, latents = rows(sum(queries), sum(lengths), 20)
    arguments = q, latents, bounds(*queries), bounds(*lengths), None, L, SCALE
    whole = on_triton.forward(*arguments, ways=1)
    for ways in (2, 3, 16):
        assert all(map(torch.equal, on_triton.forward(*arguments, ways=ways), whole)), ways


def test_a_graph_of_decode_steps_replays_with_other_lengths():
    lengths = (1500, 700)
    q, latents = rows(2, sum(lengths), 128)
    cache, table = paged(latents, lengths, 64)
    lens, weight = (
        torch.tensor((1, 1), device="cuda"),
        rand(128 * 256, L, dtype=torch.bfloat16, device="cuda", seed=5, scale=0.04),
    )
    parts = profile.absorbed(weight, 128, 128)

    def step():
        return profile.paged_latent_attention(q, cache, parts, table, lens, bounds_of_one, SCALE)

    bounds_of_one = bounds(1, 1)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for at in ((1500, 700), (3, 512), (1024, 513)):
        lens.copy_(torch.tensor(at))
        graph.replay()
        assert torch.equal(out, step()), at
