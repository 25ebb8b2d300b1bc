"""A whole small transformer on the kernels: logits, log-probs and gradients, bit for bit."""

import pytest
import rlk_kernels as rk
import torch
from small_model import Model

LENS = [9, 1, 33, 17]


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def model(request):
    return Model(request.param)


@pytest.fixture
def ids():
    return torch.randint(0, 97, (sum(LENS),), generator=torch.Generator().manual_seed(3))


def test_packed_equals_alone_and_reordered(model, ids):
    whole = model.prefill(ids, LENS)
    parts = ids.split(LENS)
    alone = [model.prefill(p, [len(p)]) for p in parts]
    assert torch.equal(torch.cat(alone), whole)
    order = [2, 0, 3, 1]
    mixed = model.prefill(torch.cat([parts[i] for i in order]), [LENS[i] for i in order])
    expected = whole.split(LENS)
    assert torch.equal(mixed, torch.cat([expected[i] for i in order]))


@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_decode_over_a_paged_cache_equals_prefill(model, ids, chunk):
    with torch.no_grad():
        whole = model.prefill(ids, LENS).split(LENS)
        decoded = model.decode(ids, LENS, chunk, page=4)
    assert all(torch.equal(a, b) for a, b in zip(decoded, whole, strict=True))
    for a, b, p in zip(decoded, whole, ids.split(LENS), strict=True):
        assert torch.equal(rk.logp(a[:-1], p[1:]), rk.logp(b[:-1], p[1:]))


def test_gradients_are_finite_and_repeat(model, ids):
    def grads():
        out = model.prefill(ids, LENS)
        loss = rk.logp(out, torch.cat([ids[1:], ids[:1]])).split(LENS)[0].sum()
        return torch.autograd.grad(loss, [model.embed, model.final, model.layers[0]["q"]])

    first, second = grads(), grads()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(bool(g.isfinite().all()) and bool((g != 0).any()) for g in first)
