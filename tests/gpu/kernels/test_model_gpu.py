"""On a GPU: a transformer layer by layer and whole, prefill against paged decode, bit for bit."""

import pytest
import rlk_kernels as rk
import torch
from kernel_suite import same
from small_model import Model, Sizes

SIZES = Sizes(hidden=1024, heads=16, kv_heads=8, dim=128, ff=3072, vocabulary=4099, layers=3)
LENS = [700, 1, 33, 1100, 128, 257]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_prefill_packed_alone_and_decoded_in_pieces(dtype):
    model = Model(dtype, SIZES, "cuda")
    ids = torch.randint(0, 4099, (sum(LENS),), generator=torch.Generator().manual_seed(3)).cuda()
    with torch.no_grad():
        whole = model.prefill(ids, LENS).split(LENS)
        parts = ids.split(LENS)
        for part, expected in zip(parts, whole, strict=True):
            assert torch.equal(model.prefill(part, [len(part)]), expected)
        for chunk in (17, 512):
            decoded = model.decode(ids, LENS, chunk, page=16)
            assert same(decoded, whole)
        short = [40, 1, 33, 64, 7, 1]
        few = torch.cat([p[:n] for p, n in zip(parts, short, strict=True)])
        decoded = model.decode(few, short, 1, page=16)  # token by token
        for a, b, p, n in zip(decoded, whole, parts, short, strict=True):
            assert torch.equal(a, b[:n])
            if n > 1:
                assert torch.equal(rk.logp(a[:-1], p[1:n]), rk.logp(b[: n - 1], p[1:n]))


def test_gradients_of_the_whole_model_repeat_20_times():
    model = Model(torch.bfloat16, SIZES, "cuda")
    ids = torch.randint(0, 4099, (sum(LENS),), generator=torch.Generator().manual_seed(3)).cuda()
    leaves = [model.embed, model.final, *model.layers[0].values()]

    def grads():
        out = model.prefill(ids, LENS)
        return torch.autograd.grad(rk.logp(out[:-1], ids[1:]).sum(), leaves)

    first = grads()
    assert all(bool(g.isfinite().all()) and bool((g != 0).any()) for g in first)
    for _ in range(19):
        assert same(grads(), first)
