"""On a GPU: errors, batch invariance and gradients of the operators with independent rows."""

import threading

import pytest
import rlk_kernels as rk
import torch
from kernel_suite import ROWS, differing_rows, rand, row_operators, same, within_budget
from rlk_kernels import cuda
from rlk_kernels.ahead import compiled_ahead
from rlk_kernels.device import facts
from rlk_kernels.matmul import kernels, product, self_check, split, tiles
from rlk_kernels.matmul.tile_costs import COSTS

DEVICE = "cuda"
NAMES = list(row_operators(torch.float32, "cpu"))
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
GRADIENTS = ["linear", "rms_norm", "rope", "rope_interleaved", "swiglu", "embedding", "logp"]


@pytest.mark.parametrize("split", [False, True])
def test_the_self_check_covers_every_kernel_and_finds_nothing(split):
    """The kernels of `accumulate`, of statistics and of stored epilogues too."""
    device = torch.device(DEVICE, 0)
    assert self_check.disagreements(device, split) == []
    names = {what for what, _ in self_check._checks(torch.bfloat16, device, split)}
    if facts(device).gluon:
        assert "hopper/epilogue.py" in names
        assert split or "hopper/accumulate.py" in names


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_many_tiles_of_a_split_product_have_the_bits_of_one_tile(dtype):
    for m, n, k in ((65, 33000, 1600), (1000, 5003, 776), (4096, 4096, 4096), (300, 20001, 1032)):
        x, w, bias = (
            rand(*shape, dtype=dtype, device=DEVICE, seed=i)
            for i, shape in enumerate([(m, k), (n, k), (n,)])
        )
        out = torch.empty(m, n, device=DEVICE, dtype=torch.float32)
        assert product.plan_for(x, w, False, True, out).kernel == "hopper_split"
        got = rk.linear(x, w, bias, out_dtype=torch.float32)
        self_check.run_tile(x, w, bias, out, tiles.SAFE)
        assert torch.equal(got, out), (m, n, k)
    assert product.plan_for(x[:64], w, False, True, out[:64]).kernel == "tma"


def test_tiles_of_triton_run_on_wgmma_where_their_first_operand_has_64_rows():
    wide = [x for x in tiles.product_tiles(False) if (x.n if x.swap else x.m) >= 64]
    assert len(wide) > 20
    compiled = kernels._gemm_tma_kernel.device_caches
    for tile in wide:
        compiled.clear()  # what other tests compiled
        self_check.tile_bits(tile, torch.bfloat16, torch.device(DEVICE))
        [program] = (kernel for variants, *_ in compiled.values() for kernel in variants.values())
        assert "wgmma.mma_async" in program.asm["ptx"], tile


SPECIALIZED = [tile for tile in COSTS if tile.warp_specialized]


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize(
    ("m", "n", "k", "bias", "out_dtype"),
    [
        (300, 520, 200, None, None),
        (37, 1001, 136, None, None),  # rows of the output are not aligned
        (513, 776, 72, "same", None),
        (70, 1003, 264, torch.float32, None),
        (1, 2056, 760, torch.float32, torch.float32),
        (2500, 3080, 64, "same", torch.float32),  # programs have several tiles
        (2500, 3080, 1000, None, None),  # and buffers are used again
    ],
)
def test_every_tile_of_the_product_for_hopper_is_right_at_the_edges(
    m, n, k, bias, out_dtype, dtype
):
    if not facts(torch.device(DEVICE)).cuda:
        pytest.skip("no GPU of the Hopper generation")
    x = rand(m, k + 8, dtype=dtype, device=DEVICE, seed=0)[:, :k]  # rows that are apart
    w = rand(n, k, dtype=dtype, device=DEVICE, seed=1)
    b = None
    if bias is not None:
        b = rand(n, dtype=dtype if bias == "same" else bias, device=DEVICE, seed=2)
    room = torch.full((m + 2, n), 7.0, device=DEVICE, dtype=out_dtype or dtype)

    def made(tile):
        room.fill_(7.0)
        self_check.run_tile(x, w, b, room[1:-1], tile)
        assert (room[[0, -1]] == 7).all(), tile  # nothing beside it
        return room[1:-1].clone()

    expected = made(tiles.SAFE)
    assert expected.isfinite().all()
    with compiled_ahead(torch.device(DEVICE)) as ahead:
        for tile in SPECIALIZED if ahead else ():
            self_check.run_tile(x, w, b, room[1:-1], tile)
    for tile in SPECIALIZED:
        assert torch.equal(made(tile), expected), tile


def test_a_sum_that_goes_on_beyond_a_tiles_buffers_is_right():
    """K of many steps, in graphs that are replayed and on two streams."""
    x, w = (rand(m, 8200, dtype=torch.bfloat16, device=DEVICE, seed=m) for m in (200, 640))
    out = torch.empty(200, 640, device=DEVICE, dtype=torch.bfloat16)
    expected = self_check.run_tile(x, w, None, out.clone(), tiles.SAFE)
    for tile in SPECIALIZED[::7]:
        self_check.run_tile(x, w, None, out, tile)
        cuda._function.cache_clear()  # loaded while the graph is captured
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self_check.run_tile(x, w, None, out, tile)
        for _ in range(3):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, expected), tile
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            out.fill_(float("nan"))
            self_check.run_tile(x, w, None, out, tile)
        other.synchronize()
        assert torch.equal(out, expected), tile


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("shape", [(16, 32, 64), (32, 64, 128), (64, 64, 32), (128, 128, 64)])
def test_mma_sync_and_wgmma_give_the_same_bits(shape, dtype):
    tile = tiles.Tile(*shape, 4, 3)
    expected = self_check.tile_bits(tiles.SAFE, dtype, torch.device(DEVICE))
    for pointers in (False, True):
        got = self_check.tile_bits(tile, dtype, torch.device(DEVICE), pointers=pointers)
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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
@pytest.mark.parametrize("name", NAMES)
def test_an_operator_runs_on_the_gpu_of_its_tensors(name):
    assert torch.cuda.current_device() == 0
    outputs = []
    for gpu in ("cuda:0", "cuda:1"):
        op = row_operators(torch.bfloat16, gpu, size=256)[name]
        outputs.append(op.run(*op.make(300), backend="triton"))
        assert outputs[-1].device == torch.device(gpu)
    assert torch.equal(outputs[0].cpu(), outputs[1].cpu())


@pytest.mark.parametrize("n", [1024, 4096, 6144, 12288])
def test_linear_at_aligned_sizes_uses_tma_and_stays_invariant(n):
    x = rand(8200, 2048, dtype=torch.bfloat16, device=DEVICE, seed=1)
    w = rand(n, 2048, dtype=torch.bfloat16, device=DEVICE, seed=2)
    whole = rk.linear(x, w)
    for m in (*ROWS, 200, 256, 300, 512, 700, 2048, 4096):
        for first in (0, 3, 8200 - m):
            assert torch.equal(rk.linear(x[first : first + m], w), whole[first : first + m]), m


@pytest.mark.parametrize("name", NAMES)
def test_rows_cut_at_every_boundary_keep_their_bits(name):
    op = row_operators(torch.bfloat16, DEVICE, size=256)[name]
    rows = op.make(300)
    whole = op.run(*rows, backend="triton")
    for cut in range(1, 300):
        head = op.run(*(x[:cut] for x in rows), backend="triton")
        rest = op.run(*(x[cut:] for x in rows), backend="triton")
        assert torch.equal(torch.cat([head, rest]), whole), cut


def test_kernels_that_start_before_their_predecessor_ends_wait_for_its_memory():
    rk.warm_up(DEVICE)
    w = rand(1024, 1024, dtype=torch.bfloat16, device=DEVICE, seed=1, scale=1 / 32)
    gain = torch.ones(1024, dtype=torch.bfloat16, device=DEVICE)
    positions = torch.arange(2100, device=DEVICE)

    def chain(x, wait):
        for _ in range(20):
            x = rk.linear(x, w)
            wait()
            x = rk.rope(x.view(-1, 8, 128), x.view(-1, 8, 128), positions[: len(x)], theta=1e4)[0]
            wait()
            x = rk.rms_norm(x.reshape(-1, 1024), gain, 1e-6)
            wait()
        return x, rk.logp(x, positions[: len(x)] % 1024)

    for m in (1, 64, 2100):
        x = rand(m, 1024, dtype=torch.bfloat16, device=DEVICE, seed=m)
        expected = chain(x, torch.cuda.synchronize)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = chain(x, lambda: None)
        for _ in range(5):
            eager = chain(x, lambda: None)
            graph.replay()
            for got in (eager, captured):
                assert same(got, expected), m


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_tiles_give_the_bits_of_the_one_safe_tile_at_many_sizes(out_dtype, monkeypatch):
    """Full waves, tails, several tiles a program, odd rows and columns, and a bias. Not split, as
    16-bit outputs have it: fp32 shows the sums before they are rounded."""
    monkeypatch.setattr(split, "LONGEST_SEGMENT", 1 << 30)
    for n, k in ((1544, 4104), (5003, 1032), (28672, 1024)):
        w = rand(n, k, dtype=torch.bfloat16, device=DEVICE, seed=1)
        bias = rand(n, dtype=torch.bfloat16, device=DEVICE, seed=2)
        for m in (1, 77, 385, 1032):
            x = rand(m, k, dtype=torch.bfloat16, device=DEVICE, seed=m)
            outs = [torch.empty(m, n, dtype=out_dtype, device=DEVICE) for _ in range(2)]
            self_check.run_tile(x, w, bias, outs[0], tiles.SAFE)
            for tile in COSTS:
                outs[1].fill_(float("nan"))
                self_check.run_tile(x, w, bias, outs[1], tile)
                assert torch.equal(*outs), (m, n, k, tile)


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
    elif name in ("rope", "rope_interleaved"):
        interleaved = name == "rope_interleaved"
        positions = torch.randint(0, 30000, (m,), generator=torch.Generator().manual_seed(5)).cuda()
        leaves = r(m, 6, 64, seed=1), r(m, 2, 64, seed=2)
        out = rk.rope(
            *leaves, positions, theta=1e4, rotary_dim=48, interleaved=interleaved, backend="triton"
        )
        out = torch.cat(out, 1)

        def truth(q, k):
            x = torch.cat([q, k], 1)
            frequency = 1e4 ** -(torch.arange(0, 48, 2, dtype=torch.float64, device=device) / 48)
            angle = (positions.float()[:, None] * frequency.float()).double()[:, None]
            c, s = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
            x, rest = x[..., :48], x[..., 48:]
            a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
            pair = [a * c - b * s, b * c + a * s]
            y = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
            return torch.cat([y, rest], -1)
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
    torch_leaves = [x.detach().requires_grad_() for x in leaves]
    torch_out = truth(*torch_leaves)
    torchs = torch.autograd.grad(torch_out, torch_leaves, dy.to(torch_out.dtype))
    return runs, exact, torchs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_right_and_the_same_in_20_runs(name, dtype):
    runs, exact, torchs = gradients(name, dtype)
    assert all(same(grads, runs[0]) for grads in runs[1:])
    for value, truth, torch_value in zip(runs[0], exact, torchs, strict=True):
        assert within_budget(value, truth, torch_value, dtype)


def test_the_choice_on_a_gpu_is_triton_and_float64_goes_to_torch():
    rk.reset_backend_calls()
    x = torch.randn(3, 8, device=DEVICE, dtype=torch.bfloat16)
    rk.linear(x, x)
    assert rk.last_backend("linear").startswith("triton")
    rk.linear(x.double(), x.double())
    assert rk.last_backend("linear") == "torch"
    with pytest.raises(rk.UnsupportedDtype):
        rk.linear(x.double(), x.double(), backend="triton")


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float64])
def test_results_have_the_dtype_that_is_asked_for(out_dtype):
    x = torch.randn(300, 512, device=DEVICE, dtype=torch.bfloat16)
    w = torch.randn(4096, 512, device=DEVICE, dtype=torch.bfloat16)
    y = rk.linear(x, w, out_dtype=out_dtype)
    assert torch.equal(y, rk.linear(x, w, out_dtype=torch.float32).to(out_dtype))


def test_a_thread_that_has_not_called_cuda_yet_can_multiply():
    x = torch.randn(300, 1024, device=DEVICE, dtype=torch.bfloat16)
    w = torch.randn(4096, 1024, device=DEVICE, dtype=torch.bfloat16)
    out, expected, outputs = (
        torch.empty(300, 4096, device=DEVICE, dtype=x.dtype),
        rk.linear(x, w),
        [],
    )
    torch.cuda.synchronize()
    thread = threading.Thread(target=lambda: outputs.append(rk.linear(x, w, out=out)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(outputs[0], expected)


def test_compiled_equals_eager():
    x = torch.randn(33, 512, device=DEVICE, dtype=torch.bfloat16)
    w = torch.randn(1024, 512, device=DEVICE, dtype=torch.bfloat16)
    gain = torch.randn(512, device=DEVICE, dtype=torch.bfloat16)

    def block(x):
        gate, up = rk.linear(rk.rms_norm(x, gain, 1e-6), w).chunk(2, -1)
        return rk.swiglu(gate, up)

    assert torch.equal(torch.compile(block, fullgraph=True)(x), block(x))
