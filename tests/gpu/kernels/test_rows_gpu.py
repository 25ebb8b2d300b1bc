"""On a GPU: errors, batch invariance and gradients of the operators with independent rows."""

import pytest
import rlk_kernels as rk
import torch
from kernel_suite import ROWS, differing_rows, rand, row_operators, within_budget
from rlk_kernels import cornerstone, gemm, tiles

DEVICE = "cuda"
NAMES = list(row_operators(torch.float32, "cpu"))
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_cornerstone_every_tile_gives_the_same_fp32_bits(dtype):
    expected = cornerstone.tile_bits(tiles.SAFE, dtype, torch.device(DEVICE))
    assert expected.isfinite().all()
    for tile in tiles.tiles_in_use():
        assert torch.equal(cornerstone.tile_bits(tile, dtype, torch.device(DEVICE)), expected), tile
    by_pointers = cornerstone.tile_bits(tiles.SAFE, dtype, torch.device(DEVICE), pointers=True)
    assert torch.equal(by_pointers, expected)


def test_every_tile_runs_on_wgmma():
    for tile in tiles.tiles_in_use():
        cornerstone.tile_bits(tile, torch.bfloat16, torch.device(DEVICE))
    programs = [
        kernel.asm["ptx"]
        for kernels, *_ in gemm._gemm_tma_kernel.device_caches.values()
        for kernel in kernels.values()
    ]
    assert len(programs) >= len(tiles.tiles_in_use())
    assert all("wgmma.mma_async" in ptx for ptx in programs)


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("shape", [(16, 32, 64), (32, 64, 128), (64, 64, 32), (128, 128, 64)])
def test_cornerstone_mma_sync_and_wgmma_give_the_same_bits(shape, dtype):
    tile = tiles.Tile(*shape, 4, 3)
    expected = cornerstone.tile_bits(tiles.SAFE, dtype, torch.device(DEVICE))
    for pointers in (False, True):
        got = cornerstone.tile_bits(tile, dtype, torch.device(DEVICE), pointers=pointers)
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_error_is_no_larger_than_torchs(name, dtype):
    op = row_operators(dtype, DEVICE, size=1000)[name]
    rows = op.make(257)
    value, truth = op.run(*rows, backend="triton"), op.truth(*rows)
    wide = name in ("logp", "linear_fp32_out")
    assert within_budget(value, truth, op.torch_run(*rows), torch.float32 if wide else dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [96, 4096])
@pytest.mark.parametrize("name", NAMES)
def test_a_row_does_not_depend_on_its_batch(name, size, dtype):
    op = row_operators(dtype, DEVICE, size=size)[name]
    rows = op.make(1000)
    for m in ROWS:
        for first in {0, 1, 500 - m // 2, 1000 - m} if m < 1000 else {0}:
            picked = torch.arange(first, first + m, device=DEVICE)
            if first + m <= 1000:
                assert differing_rows(op, "triton", rows, picked) == 0, (m, first)
    assert differing_rows(op, "triton", rows, torch.randperm(1000, device=DEVICE)) == 0


@pytest.mark.parametrize("n", [1024, 4096, 6144, 12288])
def test_linear_at_aligned_sizes_uses_tma_and_stays_invariant(n):
    x = rand(8200, 2048, dtype=torch.bfloat16, device=DEVICE, seed=1)
    w = rand(n, 2048, dtype=torch.bfloat16, device=DEVICE, seed=2)
    whole = rk.linear(x, w)
    for m in (*ROWS, 200, 256, 300, 512, 700, 2048, 4096):
        for first in (0, 3, 8200 - m):
            assert torch.equal(rk.linear(x[first : first + m], w), whole[first : first + m]), m


def gradients(name, dtype, size=384, m=257):
    device = DEVICE
    r = lambda *s, seed: rand(*s, dtype=dtype, device=device, seed=seed).requires_grad_()  # noqa: E731
    if name == "linear":
        leaves = r(m, size, seed=1), r(size + 8, size, seed=2), r(size + 8, seed=3)
        out = rk.linear(*leaves, backend="triton")
        truth = torch.nn.functional.linear
    elif name == "rms_norm":
        leaves = r(m, size, seed=1), r(size, seed=2)
        out = rk.rms_norm(*leaves, 1e-6, cast="vllm", backend="triton")

        def truth(x, w):
            return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w
    elif name == "swiglu":
        leaves = r(m, size, seed=1), r(m, size, seed=2)
        out = rk.swiglu(*leaves, backend="triton")

        def truth(g, u):
            return torch.nn.functional.silu(g) * u
    elif name == "embedding":
        ids = torch.randint(0, 40, (m,), generator=torch.Generator().manual_seed(5)).to(device)
        leaves = (r(40, size, seed=1),)
        out = rk.embedding(ids, *leaves, backend="triton")

        def truth(w):
            return w[ids]
    else:
        target = torch.randint(0, size, (m,), generator=torch.Generator().manual_seed(5)).to(device)
        leaves = (r(m, size, seed=1),)
        out = rk.logp(*leaves, target, backend="triton")

        def truth(x):
            wide = torch.float64 if x.dtype == torch.float64 else torch.float32
            z = torch.log_softmax(x.to(wide), -1)
            return z.gather(-1, target[:, None]).squeeze(-1)

    dy = rand(*out.shape, dtype=out.dtype, device=device, seed=9)
    runs = [torch.autograd.grad(out, leaves, dy, retain_graph=True) for _ in range(20)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact = torch.autograd.grad(truth(*wide), wide, dy.double())
    own_leaves = [x.detach().requires_grad_() for x in leaves]
    own_out = truth(*own_leaves)
    own = torch.autograd.grad(own_out, own_leaves, dy.to(own_out.dtype))
    return runs, exact, own


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["linear", "rms_norm", "swiglu", "embedding", "logp"])
def test_gradients_are_right_and_the_same_in_20_runs(name, dtype):
    runs, exact, own = gradients(name, dtype)
    for grads in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads, runs[0], strict=True))
    for value, truth, torch_value in zip(runs[0], exact, own, strict=True):
        assert within_budget(value, truth, torch_value, dtype)


def test_the_choice_on_a_gpu_is_triton_and_float64_goes_to_torch():
    rk.reset_backend_calls()
    x = torch.randn(3, 8, device=DEVICE, dtype=torch.bfloat16)
    rk.linear(x, x)
    assert rk.last_backend("linear") == "triton"
    rk.linear(x.double(), x.double())
    assert rk.last_backend("linear") == "torch"
    with pytest.raises(rk.UnsupportedDtype):
        rk.linear(x.double(), x.double(), backend="triton")


def test_cuda_graph_replays_the_bits_of_the_eager_call():
    rk.warm_up(DEVICE)
    x = torch.randn(16, 1024, device=DEVICE, dtype=torch.bfloat16)
    w = torch.randn(4096, 1024, device=DEVICE, dtype=torch.bfloat16)
    eager = rk.linear(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = rk.linear(x, w)
    graph.replay()
    assert torch.equal(y, eager)


def test_compiled_equals_eager():
    x = torch.randn(33, 512, device=DEVICE, dtype=torch.bfloat16)
    w = torch.randn(1024, 512, device=DEVICE, dtype=torch.bfloat16)
    gain = torch.randn(512, device=DEVICE, dtype=torch.bfloat16)

    def block(x):
        gate, up = rk.linear(rk.rms_norm(x, gain, 1e-6), w).chunk(2, -1)
        return rk.swiglu(gate, up)

    assert torch.equal(torch.compile(block, fullgraph=True)(x), block(x))
