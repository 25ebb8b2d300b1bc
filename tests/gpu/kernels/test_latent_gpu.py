"""Attention over latents on a GPU, with the widths of DeepSeek-V3: float64 budgets, and the bits of
decode, of a prefill cut anywhere, and of chunks that programs divide; by the kernel in plain Triton
and by that for Hopper, which has its bits."""

import pytest
import rlk_kernels as rk
import torch
from kernel_suite import LIMIT, rand
from rlk_kernels.integrations import profile
from rlk_kernels.launching import cdiv
from rlk_kernels.ops.head_linear import launch
from rlk_kernels.ops.latent_attention import on_hopper, on_triton
from rlk_kernels.ops.latent_attention.operator import latent_attention_ref

L, R, SCALE = 512, 64, 0.07
HOW = {"latent": L, "scale": SCALE}
HEADS = (128, 20, 4)
BORDERS = (1, 63, 64, 65, 511, 512, 513, 1023, 1024, 1025)
"""Keys around the ends of blocks and chunks."""
STEPS = (
    *([n] for n in BORDERS), [4096], [40000], [5, 3000, 512, 1025], [0, 7, 9000, 20], [0], [0, 0],
    list(BORDERS), [4096] * 32, [30 * i for i in range(64)], [700] * 150,
)  # fmt: skip
"""The keys of each sequence of a step of decode."""
CUTS = (
    ([3], [512]),
    ([3], [513]),
    ([64], [64]),
    ([5, 1, 2], [3000, 900, 5000]),
    ([1, 0, 200, 40], [4, 9, 700, 40]),
    ([4, 2], [2, 600]),
    ([1500, 40], [1500, 1100]),
)
"""The queries, and the keys, of each sequence; also fewer keys than queries."""


@pytest.fixture(params=[False, True], ids=["plain", "hopper"])
def special(request, monkeypatch):
    """Whether the kernel for Hopper runs."""
    monkeypatch.setattr(on_triton, "SPECIAL", request.param)


def rows(queries, keys, heads, dtype=torch.bfloat16):
    made = {"dtype": dtype, "device": "cuda"}
    return rand(queries, heads, L + R, seed=1, **made), rand(keys, L + R, seed=2, **made)


def bounds(*lengths):
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def paged(latents, lengths, page, width=0):
    """(cache, table): blocks in a shuffled order, NaN where no key is; at least `width` blocks in a
    row of the table."""
    counts = [cdiv(n, page) for n in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(3))
    table = torch.full((len(counts), max(*counts, width, 1)), sum(counts))
    slots, begin = [], 0
    for b, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        table[b, :count] = order[begin : begin + count]
        begin += count
        key = torch.arange(length)
        slots.append(table[b, key // page] * page + key % page)
    cache = latents.new_full((sum(counts) + 1, page, L + R), float("nan"))
    cache.view(-1, L + R)[torch.cat(slots).to(latents.device)] = latents
    table = table.int()
    return cache, table.cuda()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("heads", HEADS)
def test_outputs_and_gradients_are_those_of_float64(heads, dtype, special):
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
def test_decode_and_cut_prefills_have_the_bits_of_the_whole(heads, page, special):
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


def test_a_graph_of_decode_steps_replays_with_other_lengths(special):
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


def same_by_both(q, latents, cu_q, lens, table):
    """Compare the kernel for Hopper, several times, with the one in plain Triton; returns the
    outputs of the queries of all sequences."""
    arguments = q, latents, cu_q, lens, table, L, SCALE
    assert on_hopper.can_run(q, latents, cu_q.numel() - 1, table, L)
    plain, count = on_triton.forward(*arguments, special=False), int(cu_q[-1])
    wanted = plain[0][:count], plain[1][:, :count]
    for _ in range(3):
        out, lse = on_triton.forward(*arguments, special=True)
        assert torch.equal(out[:count], wanted[0])
        assert torch.equal(lse[:, :count], wanted[1])
    assert bool(wanted[0].isfinite().all())
    return wanted[0]


@pytest.mark.parametrize("page", [8, 16, 64, 128])
@pytest.mark.parametrize("heads", [1, 4, 16, 20, 64, 96, 128])
def test_decode_on_hopper_has_the_bits_of_plain_triton(heads, page):
    for lengths in STEPS:
        q, latents = rows(len(lengths), sum(lengths), heads)
        cu_q, lens = bounds(*[1] * len(lengths)), torch.tensor(lengths, device="cuda").int()
        cache, table = paged(latents, lengths, page)
        outputs = same_by_both(q, cache, cu_q, lens, table)
        cache, table = paged(latents, lengths, page, width=3000)
        assert torch.equal(same_by_both(q, cache, cu_q, lens, table), outputs), lengths


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [1, 4, 16, 20, 64, 96, 128])
def test_several_queries_on_hopper_have_the_bits_of_plain_triton(heads, dtype):
    for queries, lengths in CUTS:
        q, latents = rows(sum(queries), sum(lengths), heads, dtype)
        cu_q, lens = bounds(*queries), torch.tensor(lengths, device="cuda").int()
        outputs = same_by_both(q, latents, cu_q, bounds(*lengths), None)
        for width in (0, 1000):
            cache, table = paged(latents, lengths, 16, width)
            assert torch.equal(same_by_both(q, cache, cu_q, lens, table), outputs), queries


def test_each_key_counts_on_hopper():
    """A change of any key of a sequence, at the ends of blocks and chunks too, changes every head;
    a change of any other slot changes none."""
    length, page = 1100, 64
    q, latents = rows(1, length, 128)
    q = q.abs()  # so that a larger latent has a larger score
    cache, table = paged(latents, [length], page)
    lens = torch.tensor([length], device="cuda").int()

    def out():
        return on_triton.forward(q, cache, bounds(1), lens, table, L, SCALE, special=True)[0]

    whole = out()
    for key in (0, 31, 63, 64, 511, 512, 1023, 1024, 1087, 1088, length - 1):
        row = cache[table[0, key // page], key % page]
        for features in (slice(0, 256), slice(256, 512)):
            kept = row[features].clone()
            row[features] += 1
            changed = out()
            row[features] = kept
            assert bool((changed[0] != whole[0])[:, features].any(1).all()), (key, features)
    cache[table[0, -1], length % page :] = 7
    assert torch.equal(out(), whole)


@pytest.mark.parametrize("scratch", [1 << 28, 1 << 22, 1 << 12])
def test_the_room_for_chunks_changes_no_bit_on_hopper(monkeypatch, scratch):
    monkeypatch.setattr(on_hopper, "SCRATCH_BYTES", scratch)
    monkeypatch.setattr(on_hopper, "shape_cache", on_hopper.shape_cache.__wrapped__)
    for heads in (4, 128):
        for lengths in ([40000], [9000, 70, 5000], [2000] * 20):
            q, latents = rows(len(lengths), sum(lengths), heads)
            cache, table = paged(latents, lengths, 64)
            lens = torch.tensor(lengths, device="cuda").int()
            same_by_both(q, cache, bounds(*[1] * len(lengths)), lens, table)


@pytest.mark.parametrize("heads", [1, 4, 16])
def test_a_prompt_that_neighbours_share_changes_no_bit_on_hopper(heads):
    for prompt, extra in ((512, 0), (4096, 500), (3072, 3000)):
        lengths = [prompt + extra * i // 16 for i in range(16)]
        q, latents = rows(16, sum(lengths), heads)
        cache, table = paged(latents, lengths, 64)
        for b in range(16):
            table[b, : prompt // 64] = table[b // 8 * 8, : prompt // 64]
        lens = torch.tensor(lengths, device="cuda").int()
        same_by_both(q, cache, bounds(*[1] * 16), lens, table)


def test_calls_on_several_streams_do_not_meet_on_hopper():
    streams, made = [torch.cuda.Stream() for _ in range(3)], []
    for lengths in ([30000], [5000, 9000], [4096] * 8):
        q, latents = rows(len(lengths), sum(lengths), 128)
        cache, table = paged(latents, lengths, 64)
        lens = torch.tensor(lengths, device="cuda").int()
        arguments = q, cache, bounds(*[1] * len(lengths)), lens, table, L, SCALE
        made.append((arguments, on_triton.forward(*arguments, special=False)[0]))
    torch.cuda.synchronize()
    outputs = []
    for _ in range(30):
        for stream, (arguments, wanted) in zip(streams, made, strict=True):
            with torch.cuda.stream(stream):
                outputs.append((on_triton.forward(*arguments, special=True)[0], wanted))
    torch.cuda.synchronize()
    assert all(torch.equal(out, wanted) for out, wanted in outputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "width"), [(128, 128), (20, 192)])
def test_products_by_head_have_the_bits_of_linear(heads, width, dtype):
    both = rand(heads, width + 128, L, dtype=dtype, device="cuda", seed=1)
    keys, values = both[:, :width].mT, both[:, width:]
    for tokens in (1, 7, 33, 90, 300, 1025):
        q = rand(tokens, heads, width + R, dtype=dtype, device="cuda", seed=2)
        x = rand(tokens, heads, L, dtype=dtype, device="cuda", seed=3)
        assert launch.can_run(q[..., :width], keys)
        assert launch.can_run(x, values)
        whole = rk.head_linear(q[..., :width], keys, q[..., width:])
        out = rk.head_linear(x, values)
        assert torch.equal(whole[..., L:], q[..., width:])
        for h in range(0, heads, 3):
            assert torch.equal(whole[:, h, :L], rk.linear(q[:, h, :width].contiguous(), keys[h]))
            assert torch.equal(out[:, h], rk.linear(x[:, h].contiguous(), values[h]))
