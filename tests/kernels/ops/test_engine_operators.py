"""What only engines ask for: keys and values into a paged cache, log-probs of given ids,
the largest
logits. Portable and Triton; each claim is broken on purpose too."""

import pytest
import rlk_kernels as rk
import torch
from kernel_suite import rand
from rlk_kernels.ops.kv_cache import portable as kv_portable


def caches(layout, blocks=5, page=4, heads=3, dim=8, dtype=torch.float32):
    """(k_cache, v_cache, all of their memory) as engines lay them out."""
    if layout == "separate":
        both = torch.full((2, blocks, page, heads, dim), 7.0, dtype=dtype)
        return both[0], both[1], both
    if layout == "halves of a block":
        both = torch.full((blocks, 2, page, heads, dim), 7.0, dtype=dtype)
        return both[:, 0], both[:, 1], both
    both = torch.full((blocks, heads, page, 2 * dim), 7.0, dtype=dtype)  # vLLM's
    return *both.transpose(1, 2).split(dim, -1), both


LAYOUTS = ["separate", "halves of a block", "vLLM"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_and_values_lie_in_their_slots_and_nowhere_else(backend, layout, dtype):
    k_cache, v_cache, memory = caches(layout, dtype=dtype)
    qkv = rand(6, 9, 8, dtype=dtype, device="cpu", seed=1)
    k, v = qkv[:, 3:6], qkv[:, 6:]  # slices of one projection
    slots = torch.tensor([19, 0, -1, 7, 6, 12])
    expected = memory.clone()
    other_k, other_v, _ = caches(layout, dtype=dtype)
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            other_k[slot // 4, slot % 4], other_v[slot // 4, slot % 4] = k[t], v[t]
    rk.write_kv_cache(k, v, k_cache, v_cache, slots, backend=backend)
    assert torch.equal(k_cache, other_k)
    assert torch.equal(v_cache, other_v)
    assert not torch.equal(memory, expected)
    untouched = caches(layout, dtype=dtype)
    for t in (3, 0, 5, 4, 1, 2):  # one token at a time, in another order
        part = slice(t, t + 1)
        rk.write_kv_cache(k[part], v[part], *untouched[:2], slots[part].int(), backend=backend)
    assert torch.equal(untouched[2], memory)


def test_a_slot_off_by_one_is_noticed(monkeypatch):
    write = kv_portable.write
    monkeypatch.setattr(kv_portable, "write", lambda *x: write(*x[:4], x[4] ^ 1))
    with pytest.raises(AssertionError):
        test_keys_and_values_lie_in_their_slots_and_nowhere_else("torch", "separate", torch.float32)


def logits_with_ties(t=7, v=1000):
    x = rand(t, v, dtype=torch.float32, device="cpu", seed=3)
    x = (x * 4).round() / 4  # many are equal
    x[0] = 0.0
    x[0, 5::2] = -0.0
    x[1, 10:] = -float("inf")
    return x


def largest(x, k):
    """Ids of the k largest of each row, of equal ones the lowest first, by a loop."""
    return torch.tensor(
        [sorted(range(len(row)), key=lambda i, row=row: (-row[i], i))[:k] for row in x.tolist()]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 5, 20])
def test_the_largest_logits_and_given_ids_have_the_bits_of_targets(backend, k, dtype):
    x = logits_with_ties().to(dtype)
    options = {"temperature": 0.7, "backend": backend}
    target = torch.arange(7) * 30 - 30  # one is ignored
    token_ids = torch.stack([target.clamp(min=0), target, torch.full((7,), 999)], 1)
    plain = rk.logp(x, target, **options)
    logps, ids_logp, top, ids = rk.logp(x, target, token_ids=token_ids, top_k=k, **options)
    assert torch.equal(logps, plain)
    assert torch.equal(ids, largest(x.float(), k))
    assert ids.dtype == torch.int64
    for column, values in ((token_ids, ids_logp), (ids, top)):
        for j in range(column.shape[1]):
            assert torch.equal(values[:, j], rk.logp(x, column[:, j].contiguous(), **options))
    rows = torch.tensor([4, 1])
    lone = rk.logp(x[rows], target[rows], token_ids=token_ids[rows], top_k=k, **options)
    whole = (logps, ids_logp, top, ids)
    assert all(torch.equal(a, b[rows]) for a, b in zip(lone, whole, strict=True))
    only = rk.logp(x, target, top_k=k, **options)
    assert len(only) == 3
    assert torch.equal(only[2], ids)


def test_the_gradient_is_that_of_the_target_alone(backend):
    x = logits_with_ties()[2:].requires_grad_()
    target = torch.arange(5)
    plain = torch.autograd.grad(rk.logp(x, target, backend=backend).sum(), x)[0]
    logps, _, top, _ = rk.logp(x, target, token_ids=target[:, None], top_k=3, backend=backend)
    assert not top.requires_grad
    assert torch.equal(torch.autograd.grad(logps.sum(), x)[0], plain)


def test_an_order_of_ties_that_is_not_the_lowest_ids_is_noticed(monkeypatch):
    sort = torch.sort

    def unstable(x, **more):
        values, indices = sort(x.flip(-1), **more)
        return values, x.shape[-1] - 1 - indices

    monkeypatch.setattr(torch, "sort", unstable)
    with pytest.raises(AssertionError):
        test_the_largest_logits_and_given_ids_have_the_bits_of_targets("torch", 5, torch.float32)


def test_rope_turns_queries_and_keys_as_it_turns_each_alone():
    for t, backend in ((9, "torch"), (9, "triton"), (2100, "torch")):
        q, k = (rand(t, h, 16, dtype=torch.float32, device="cpu", seed=h) for h in (10, 3))
        at = torch.arange(2 * t)[::2]  # strided
        q_out, k_out = rk.rope(q, k, at, theta=1e4, backend=backend)
        assert torch.equal(rk.rope(k, q, at, theta=1e4, backend=backend)[0], k_out)
        for h in range(3):
            lone = rk.rope(q[:, h : h + 1], k[:, :0], at, theta=1e4, backend=backend)
            assert torch.equal(lone[0], q_out[:, h : h + 1])


def test_heads_of_a_fused_projection_are_normed_where_they_lie(backend):
    qkv = rand(5, 9 * 8, dtype=torch.float32, device="cpu", seed=3)
    weight = rand(8, dtype=torch.float32, device="cpu", seed=4)
    strided = qkv[:, 24:64].view(5, 5, 8).requires_grad_()  # five heads of nine
    dense = strided.detach().contiguous().requires_grad_()
    normed, expected = (
        rk.rms_norm(x, weight, 1e-6, cast="vllm", backend=backend) for x in (strided, dense)
    )
    assert torch.equal(normed, expected)
    (normed * normed).sum().backward()
    (expected * expected).sum().backward()
    assert torch.equal(strided.grad, dense.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_plus_has_the_bits_of_a_sum_in_fp32(backend, dtype):
    x, residual = (rand(40, 96, dtype=dtype, device="cpu", seed=s) for s in (1, 2))
    weight = rand(96, dtype=dtype, device="cpu", seed=3) / 8

    def normed(**how):
        leaves = [x.clone().requires_grad_() for x in (x, residual, weight)]
        factor = leaves[2] if how else leaves[2].float() + 1.0
        y, s = rk.rms_norm(leaves[0], factor, 1e-6, residual=leaves[1], backend=backend, **how)
        return y, s, *torch.autograd.grad((y, s), leaves, (y.detach().cos(), s.detach().sin()))

    pairs = zip(normed(one_plus=True), normed(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(normed(one_plus=True)[0], normed(one_plus=False)[0])
