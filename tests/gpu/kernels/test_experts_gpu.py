"""A sparse layer on a GPU: a row has the bits of `linear`, whatever rows are beside it."""

import pytest
import rlk_kernels as rk
import torch
from expert_suite import SPREADS, by_linear, chosen, layer, weights
from kernel_suite import rand
from rlk_kernels.ops.combine import portable as combine_portable
from rlk_kernels.ops.experts import launch
from rlk_kernels.ops.experts import portable as experts_portable
from rlk_kernels.ops.experts.operator import grouped_linear_ref
from rlk_kernels.ops.linear import input_grad, weight_grad
from rlk_kernels.ops.routing import portable as routing_portable
from rlk_kernels.ops.routing.operator import route_corrected_ref, route_ref

SIZES = [
    # tokens, experts, k, N, K
    (1, 128, 8, 1536, 2048),
    (33, 128, 8, 2048, 768),
    (300, 16, 4, 1000, 776),
    (700, 8, 2, 264, 100),  # rows that no tensor map describes
    (3000, 32, 4, 512, 1024),
]
HALF = [torch.bfloat16, torch.float16]
CUDA = "cuda"


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_a_row_has_the_bits_of_linear(dtype, size, spread):
    t, experts, top_k, n, k = size
    ids = chosen(t, experts, top_k, spread, CUDA)
    weight = weights(experts, n, k, dtype, CUDA)
    groups = rk.group_by_expert(ids, experts)
    for shape in ((t, k), (t, top_k, k)):
        x = rand(*shape, dtype=dtype, device=CUDA, seed=5)
        y = rk.grouped_linear(x, weight, groups)
        assert rk.last_backend("grouped_linear").startswith("triton")
        assert torch.equal(y, by_linear(x, weight, ids, None))
        part = slice(t // 2, t // 2 + 3)
        alone = rk.group_by_expert(ids[part].contiguous(), experts)
        assert torch.equal(rk.grouped_linear(x[part], weight, alone), y[part])
    truth = grouped_linear_ref(x, weight, ids)
    limit = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 2e-6}[dtype]
    assert float((y - truth).abs().max()) <= limit * float(truth.abs().max())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_swiglu_in_the_product_has_the_bits_of_swiglu(dtype, size):
    t, experts, top_k, n, k = size
    weight = weights(experts, 2 * n, k, dtype, CUDA)
    for spread in ("skewed", "dropped"):
        ids = chosen(t, experts, top_k, spread, CUDA)
        groups = rk.group_by_expert(ids, experts)
        for shape in ((t, k), (t, top_k, k)):
            x = rand(*shape, dtype=dtype, device=CUDA, seed=5)
            expected = rk.swiglu(*rk.grouped_linear(x, weight, groups).chunk(2, -1))
            assert torch.equal(rk.grouped_swiglu(x, weight, groups), expected)


@pytest.mark.parametrize("tile", [t for _, t in launch.BY_ROWS] + [launch.MANY_ROWS, launch.SAFE])
@pytest.mark.parametrize("dtype", HALF)
def test_every_tile_gives_the_same_bits(dtype, tile, monkeypatch):
    t, experts, top_k, n, k = 200, 8, 4, 520, 1032
    ids = chosen(t, experts, top_k, "skewed", CUDA)
    weight = weights(experts, n, k, dtype, CUDA)
    x = rand(t, k, dtype=dtype, device=CUDA, seed=5)
    groups = rk.group_by_expert(ids, experts)
    monkeypatch.setattr(launch, "tile_for", lambda *_: tile)
    expected = by_linear(x, weight, ids, None)
    for few in (0, launch.few_for(tile, True)):
        monkeypatch.setattr(launch, "few_for", lambda *_, few=few: few)
        launch.shape_cache.cache_clear()
        assert torch.equal(rk.grouped_linear(x, weight, groups), expected)
    launch.shape_cache.cache_clear()


@pytest.mark.parametrize("size", [(300, 16, 4, 1000, 776), (2000, 32, 4, 512, 1024)])
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("spread", ["skewed", "dropped"])
def test_gradients_have_the_bits_of_linears(dtype, size, spread):
    t, experts, top_k, n, k = size
    ids = chosen(t, experts, top_k, spread, CUDA)
    weight = weights(experts, n, k, dtype, CUDA).requires_grad_()
    x = rand(t, top_k, k, dtype=dtype, device=CUDA, seed=5).requires_grad_()
    grad = rand(t, top_k, n, dtype=dtype, device=CUDA, seed=6)
    groups = rk.group_by_expert(ids, experts)
    dx, dw = torch.autograd.grad(rk.grouped_linear(x, weight, groups), (x, weight), grad)
    for e in range(experts):
        at = ids == e
        dy, mine = grad[at].contiguous(), x.detach()[at].contiguous()
        assert torch.equal(dw[e], weight_grad(dy, mine, dtype, "triton")), e
        if len(dy):
            assert torch.equal(dx[at], input_grad(dy, weight.detach()[e], "triton")), e
    assert not bool(dx[ids == experts].any())


@pytest.mark.parametrize("t", [1, 100, 255, 257, 5000])
@pytest.mark.parametrize("experts", [5, 128, 256])
def test_rows_are_grouped_as_the_portable_backend_groups_them(t, experts):
    for spread in SPREADS:
        ids = chosen(t, experts, 4, spread, CUDA)
        groups = rk.group_by_expert(ids, experts)
        order, offsets = experts_portable.group(ids.cpu(), experts)
        assert torch.equal(groups.order.cpu(), order)
        assert torch.equal(groups.offsets.cpu(), offsets)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("spread", ["even", "dropped"])
def test_the_sum_has_the_bits_of_the_portable_backend(dtype, spread):
    ids = chosen(300, 128, 8, spread, CUDA)
    rows = rand(300, 8, 2050, dtype=dtype, device=CUDA, seed=1)
    shares = rand(300, 8, dtype=torch.float32, device=CUDA, seed=2).softmax(-1)
    rows[ids == 128], shares[ids == 128] = float("nan"), float("nan")
    y = rk.combine_experts(rows, shares, ids, 128)
    expected = combine_portable.forward(rows.cpu(), shares.cpu(), ids.cpu(), 128)
    assert torch.equal(y.cpu(), expected)
    assert not bool(y.isnan().any())


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("experts", [8, 60, 128, 384])
def test_routing(normalize, experts):
    logits = rand(2000, experts, dtype=torch.float32, device=CUDA, seed=3, scale=4.0)
    logits[::2] = (logits[::2] * 4).round() / 4  # many tie
    shares, ids = rk.route(logits, 8, normalize=normalize)
    truth, expected = route_ref(logits, 8, normalize)
    assert torch.equal(ids, expected)
    assert bool(((shares - truth).abs() <= 3e-6 * truth + 1e-9).all())
    rows = torch.randperm(2000, device=CUDA)[:77]
    part = rk.route(logits[rows], 8, normalize=normalize)
    assert torch.equal(part[0], shares[rows])
    leaf, grad = (
        logits.clone().requires_grad_(),
        rand(2000, 8, dtype=torch.float32, device=CUDA, seed=9),
    )
    rk.route(leaf, 8, normalize=normalize)[0].backward(grad)
    wide = (x.double().cpu() for x in (logits, truth))
    dz = routing_portable.backward(*wide, ids.cpu(), grad.double().cpu(), normalize)
    assert float((leaf.grad.cpu() - dz).abs().max()) <= 4e-6


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    ("experts", "groups", "top_groups"), [(16, 4, 2), (160, 1, 1), (160, 8, 3), (256, 8, 4)]
)
def test_corrected_routing(normalize, experts, groups, top_groups):
    logits = rand(2000, experts, dtype=torch.float32, device=CUDA, seed=3, scale=2.0)
    correction = rand(experts, dtype=torch.float32, device=CUDA, seed=4, scale=0.1)
    how = {"normalize": normalize, "groups": groups, "top_groups": top_groups, "scale": 2.5}
    shares, ids = rk.route_corrected(logits, correction, 8, **how)
    wide = logits.cpu(), correction.cpu(), 8, normalize, groups, top_groups, 2.5
    truth, expected = route_corrected_ref(*wide)
    # Two scores that round to one are float64's to choose from: next to none of these tie.
    same = (ids.cpu() == expected).all(1)
    assert float(same.float().mean()) > 0.999
    close = (shares.cpu() - truth).abs() <= 3e-6 * truth
    assert bool(close[same].all())
    rows = torch.randperm(2000, device=CUDA)[:77]
    part = rk.route_corrected(logits[rows], correction, 8, **how)
    assert torch.equal(part[0], shares[rows])
    assert torch.equal(part[1], ids[rows])
    leaf = logits.clone().requires_grad_()
    grad = rand(2000, 8, dtype=torch.float32, device=CUDA, seed=9)
    rk.route_corrected(leaf, correction, 8, **how)[0].backward(grad)
    exact = routing_portable.backward_corrected(
        logits.double().cpu(), ids.cpu(), grad.double().cpu(), normalize, 2.5
    )
    assert float((leaf.grad.cpu() - exact).abs().max()) <= 4e-6


@pytest.fixture
def sparse_layer():
    """The output of a layer of 64 experts, for its input."""
    shapes = (1, 64), (64, 512), (64, 256)
    router, up, down = (weights(*shape, 256, torch.bfloat16, CUDA) for shape in shapes)
    return lambda x: layer(x, router[0], up, down, 6, None)


def test_a_cuda_graph_routes_anew(sparse_layer):
    """Nothing of a layer is decided on the host."""
    batches = [rand(40, 256, dtype=torch.bfloat16, device=CUDA, seed=s) for s in range(3)]
    x = batches[0].clone()
    sparse_layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = sparse_layer(x)
    for batch in batches:
        x.copy_(batch)
        graph.replay()
        assert torch.equal(y, sparse_layer(batch))
        for row in (0, 39):
            alone = sparse_layer(batch[row : row + 1])
            assert torch.equal(alone, y[row : row + 1])


def test_a_layer_never_waits_for_the_host(sparse_layer):
    for t in (1, 40, 3000):
        x = rand(t, 256, dtype=torch.bfloat16, device=CUDA, seed=1)
        sparse_layer(x)
        torch.cuda.set_sync_debug_mode("error")
        try:
            sparse_layer(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
