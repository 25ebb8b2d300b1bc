"""What a tensor-parallel rank computes has the bits of one rank's share, on one GPU: products of
some output columns, gradients of some input columns, attention of some heads, and the log-prob of
shards of the vocabulary. T = rows   K = in features   N = out features"""

import pytest
import rlk_kernels
import torch
from rlk_kernels.ops.linear import input_grad, weight_grad
from rlk_kernels.ops.logp import shards
from rlk_kernels.parallel.logp import merge, subtrees

BF16 = torch.bfloat16
PRODUCTS = (
    *((4096, 4096), (4096, 12288), (2560, 9728), (1024, 3072)),
    # Shards of an odd number of tiles.
    *((896, 4864), (3584, 18944)),
)
"""(N, K) of row-parallel products of published models."""


def rand(*shape, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(BF16)


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("size", PRODUCTS, ids=str)
@pytest.mark.parametrize("rows", [1, 64, 500, 4096])
def test_a_share_of_the_outputs_is_that_of_the_whole(size, tp, rows):
    n, k = size
    x, w = rand(rows, k), rand(n, k, seed=1)
    y = rlk_kernels.linear(x, w)
    own = [rlk_kernels.linear(x, part.contiguous()) for part in w.chunk(tp)]
    assert torch.equal(torch.cat(own, 1), y)


@pytest.mark.parametrize("tp", [2, 8])
def test_a_share_of_a_gradient_is_that_of_the_whole(tp):
    t, n, k = 500, 4096, 12288
    dy, w, x = rand(t, n), rand(n, k, seed=1), rand(t, k, seed=2)
    columns = [part.contiguous() for part in w.chunk(tp, 1)]
    own = torch.cat([input_grad(dy, part, "triton") for part in columns], 1)
    assert torch.equal(own, input_grad(dy, w, "triton"))
    parts = [part.contiguous() for part in dy.chunk(tp, 1)]
    own = torch.cat([weight_grad(part, x, BF16, "triton") for part in parts])
    assert torch.equal(own, weight_grad(dy, x, BF16, "triton"))


@pytest.mark.parametrize("tp", [2, 8])
def test_a_share_of_the_heads_is_that_of_all(tp):
    heads, kv, size, lengths = 32, 8, 128, (1, 500, 1300)
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    q, k, v = (rand(sum(lengths), h, size, seed=i) for i, h in enumerate((heads, kv, kv)))
    out = rlk_kernels.attention(q, k, v, cu, cu, scale=size**-0.5)
    parts = zip(*(x.chunk(tp, 1) for x in (q, k, v)), strict=True)
    own = [
        rlk_kernels.attention(*(x.contiguous() for x in part), cu, cu, scale=size**-0.5)
        for part in parts
    ]
    assert torch.equal(torch.cat(own, 1), out)


@pytest.mark.parametrize(("columns", "tp"), [(151_936, 8), (128_256, 2), (32_000, 4)])
def test_the_log_prob_of_shards_is_that_of_the_vocabulary(columns, tp):
    logits = torch.randn(300, columns, device="cuda") * 5
    target = torch.randint(0, columns, (300,), device="cuda")
    step = columns // tp
    trees = [tree for r in range(tp) for tree in subtrees(r * step, (r + 1) * step)]
    nodes = [shards.node_of(logits[:, slice(*tree.columns)], "triton") for tree in trees]
    z = logits.gather(1, target[:, None]).view(-1)
    logp, _ = shards.logp_of_nodes(z, target, merge(trees, nodes), "triton")
    assert torch.equal(logp, rlk_kernels.logp(logits, target))
