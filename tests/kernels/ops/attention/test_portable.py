"""Attention on the portable backend: errors, and the same bits however a row is reached."""

import pytest
import rlk_kernels as rk
import torch
from kernel_suite import attention_within_budget, packed, paged_cache

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(4, 2, 16), (3, 1, 24), (2, 2, 64)]


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 9), (False, None)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_no_larger_than_torchs(dtype, shape, causal, window):
    args = packed([7, 1, 30], [7, 40, 61], *shape, dtype, "cpu")
    assert attention_within_budget(args, "torch", causal, window, 1e-5)


WINDOWS = {torch.bfloat16: 40, torch.float16: None, torch.float32: 40}
"""The window of a dtype that is tested by default; the whole matrix has all pairs."""


@pytest.mark.parametrize(
    ("dtype", "window"),
    [
        pytest.param(d, w, marks=() if WINDOWS[d] == w else pytest.mark.whole_matrix)
        for d in DTYPES
        for w in (None, 40)
    ],
)
def test_prefill_equals_paged_decode_and_every_chunking(dtype, window):
    n = 300  # crosses a chunk of 256 keys
    # Every place in a page, and all lengths around the chunk's end.
    cuts = (*range(1, 34), *range(35, 245, 30), *range(245, n))
    q, k, v, cu_q, cu_k = packed([n], [n], 4, 2, 16, dtype, "cpu")
    whole, lse = rk.attention(q, k, v, cu_q, cu_k, window=window, return_lse=True)
    k_cache, v_cache, table, _ = paged_cache(k, v, cu_k, page=16)
    at = [0, 1, 15, 16, 17, 63, 64, 100, 254, 255, 256, 257, n - 1]
    out, part = rk.paged_attention(
        q[at], k_cache, v_cache, table.expand(len(at), -1), torch.tensor(at) + 1,
        cu_seqlens_q=torch.arange(len(at) + 1), window=window, return_lse=True,
    )  # fmt: skip
    assert torch.equal(out, whole[at])
    assert torch.equal(part, lse[:, at])
    for cut in cuts:  # a cached prefix of that length, then the rest in one piece
        rest = rk.paged_attention(
            q[cut:], k_cache, v_cache, table, torch.tensor([n]),
            cu_seqlens_q=torch.tensor([0, n - cut]), window=window,
        )  # fmt: skip
        assert torch.equal(rest, whole[cut:])
        first = torch.tensor([0, cut])
        head = rk.attention(q[:cut], k[:cut], v[:cut], first, first, window=window)
        assert torch.equal(head, whole[:cut])


def test_the_budget_of_memory_changes_no_bit(monkeypatch):
    args = packed([7, 40, 1], [7, 90, 61], 4, 2, 16, torch.float32, "cpu")
    whole = rk.attention(*args)
    for memory in (1, 1000, 1 << 30):
        monkeypatch.setattr("rlk_kernels.ops.attention.portable.MEMORY", memory)
        assert torch.equal(rk.attention(*args), whole)


def test_rows_without_keys_give_zero_and_minus_infinity():
    q, k, v, cu_q, cu_k = packed([3, 2], [1, 0], 2, 1, 8, torch.float32, "cpu")
    for backend in ("torch", "triton"):
        out, lse = rk.attention(q, k, v, cu_q, cu_k, return_lse=True, backend=backend)
        assert torch.equal(out[[0, 1, 3, 4]], torch.zeros(4, 2, 8))
        assert bool((lse[:, [0, 1, 3, 4]] == float("-inf")).all())
        assert torch.allclose(out[2], v[0].expand(2, 8), atol=1e-6)


def test_a_query_gradient_does_not_depend_on_its_neighbours():
    lens = [5, 40, 1]
    q, k, v, cu, _ = packed(lens, lens, 4, 2, 16, torch.float32, "cpu")
    do = torch.randn_like(q)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    whole = torch.autograd.grad(rk.attention(*leaves, cu, cu), leaves, do)
    part = slice(5, 45)
    lone = [x[part].clone().requires_grad_() for x in (q, k, v)]
    one = torch.tensor([0, 40])
    grads = torch.autograd.grad(rk.attention(*lone, one, one), lone, do[part])
    assert all(torch.equal(a, b[part]) for a, b in zip(grads, whole, strict=True))
    tail = [q[25:45].clone().requires_grad_(), *lone[1:]]  # the last 20 queries, all 40 keys
    ends = torch.tensor([0, 20])
    dq = torch.autograd.grad(rk.attention(*tail, ends, one), tail, do[25:45])[0]
    assert torch.equal(dq, whole[0][25:45])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_weights_that_vanish_over_a_whole_chunk_are_finite(dtype):
    """Scores hundreds apart, more keys than a chunk: weights near 1e-304 lie on a grid too."""
    lens = [300]
    q, k, v, cu, _ = packed(lens, lens, 1, 1, 64, dtype, "cpu")
    leaves = [x.clone().requires_grad_() for x in (30 * q, 30 * k, v)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    grads = torch.autograd.grad(rk.attention(*leaves, cu, cu), leaves, v)
    truth = torch.autograd.grad(rk.attention(*wide, cu, cu), wide, v.double())
    limit = {torch.bfloat16: 4e-2, torch.float16: 1e-2, torch.float32: 1e-3}[dtype]
    for value, expected in zip(grads, truth, strict=True):
        error = (value.double() - expected).abs()
        assert bool((error <= limit * expected.abs().max()).all())


def bounds(*x):
    return torch.tensor(x)


@pytest.mark.parametrize(
    ("cu_q", "cu_k"),
    [
        (bounds(0, 4), bounds(0, 9)),
        (bounds(0, 9), bounds(0, 4)),
        (bounds(0, 3, 2), bounds(0, 2, 4)),
        (bounds(0, 2, 4), bounds(0, 4, 2)),
        (bounds(-1, 4), bounds(0, 4)),
        (bounds(), bounds()),
    ],
)
def test_bounds_that_reach_outside_are_an_error_and_not_another_key(cu_q, cu_k):
    q, k, v, _, _ = packed([4], [4], 2, 1, 8, torch.float32, "cpu")
    with pytest.raises(rk.UnsupportedShape, match="attention"):
        rk.attention(q, k, v, cu_q.long(), cu_k.long())


@pytest.mark.parametrize(("block", "keys"), [(1, 5), (7, 4), (-1, 4), (1, -4)])
def test_a_block_table_that_reaches_outside_is_an_error(block, keys):
    q, k, v, cu, _ = packed([2], [8], 2, 1, 8, torch.float32, "cpu")
    caches = [x.view(2, 4, 1, 8) for x in (k, v)]
    with pytest.raises(rk.UnsupportedShape, match="attention"):
        rk.paged_attention(
            q, *caches, torch.tensor([[block]]), torch.tensor([keys]), cu_seqlens_q=cu
        )


def test_an_empty_block_table_is_no_keys():
    q, k, v, cu, _ = packed([2], [8], 2, 1, 8, torch.float32, "cpu")
    caches = [x.view(2, 4, 1, 8) for x in (k, v)]
    table = torch.zeros(1, 0, dtype=torch.int32)
    out = rk.paged_attention(q, *caches, table, torch.tensor([0]), cu_seqlens_q=cu)
    assert torch.equal(out, torch.zeros_like(q))
