"""On a GPU: the tokens of `sample` against float64 and the portable backend, in any batch, in CUDA
graphs and without waiting for the GPU.

T = rows   V = vocabulary
"""

import math

import pytest
import rlk_kernels as rk
import torch
from rlk_kernels.ops.sample.operator import sample_ref
from sample_suite import check_random_rows, improbable, of_requests, picked, rows, same

V = 151_936
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LIMITS = {"top_k": 50, "top_p": 0.95, "min_p": 1e-4}
SETTINGS = [
    {}, {"temperature": 0.7, "top_k": 50}, {"top_p": 0.95}, {"top_k": 30_000},
    {"temperature": 0.8, **LIMITS}, {"temperature": 0.0},
]  # fmt: skip


def mixed(t: int) -> dict[str, torch.Tensor]:
    """Settings of t rows, no two neighbours alike."""
    i = torch.arange(t, device="cuda")
    return {
        "temperature": (i % 5).float() * 0.4,
        "top_k": torch.tensor([0, 1, 50, 70_000], device="cuda")[i % 4],
        "top_p": torch.tensor([1.0, 0.5, 0.95], device="cuda")[i % 3],
        "min_p": torch.tensor([0.0, 1e-3], device="cuda")[i // 2 % 2],
    }


def on_gpu(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.cuda() for x in tensors]


@pytest.mark.parametrize("v", [1, 17, 300, 5000, 40_000])
def test_random_rows_are_those_of_float64(v):
    check_random_rows(50, v, seed=v, backend="triton", device="cuda")


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_tokens_are_those_of_the_portable_backend(settings):
    """Sets and draws that differ would have to lie within a rounding of a border."""
    x, where = rows(16, V, seed=1), of_requests(16, seed=1)
    got = rk.sample(*on_gpu(x, *where), **settings, raw_logprobs=True)
    expected = rk.sample(x, *where, **settings, raw_logprobs=True)
    assert got.ids.tolist() == expected.ids.tolist()
    assert got.kept.tolist() == expected.kept.tolist()
    for a, b in zip(got[1:], expected[1:], strict=True):
        assert bool(((a.cpu() - b).abs() <= 5e-6).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_bits_that_it_has_alone(dtype):
    t = 256
    x, (keys, positions) = rows(t, V, seed=2, dtype=dtype).cuda(), on_gpu(*of_requests(t, 2))
    settings = mixed(t)
    whole = rk.sample(x, keys, positions, **settings, raw_logprobs=True)
    assert bool((whole.ids >= 0).all())
    wider = torch.full((t, V + 128), 99.0, device="cuda", dtype=dtype)
    order = torch.randperm(t, generator=torch.Generator().manual_seed(3)).cuda()
    for count in (1, 3, 7, 64, 256):
        index = order[:count]
        wider[:count, :V] = x[index]
        got = rk.sample(
            wider[:count, :V], keys[index], positions[index],
            **{name: y[index] for name, y in settings.items()}, raw_logprobs=True,
        )  # fmt: skip
        assert same(got, picked(whole, index))


@pytest.mark.parametrize("settings", SETTINGS[:5], ids=str)
def test_the_log_prob_is_that_of_logp_over_the_kept_logits(settings):
    x, where = rows(32, V, seed=4).cuda(), on_gpu(*of_requests(32, 4))
    got = rk.sample(x, *where, **settings, raw_logprobs=True)
    kept = rk.kept_tokens(x, **settings)
    heat = torch.full((), settings.get("temperature", 1.0), device="cuda")
    assert torch.equal(kept.sum(1).int(), got.kept)
    z = (x / heat).masked_fill(~kept, -math.inf)
    assert torch.equal(rk.logp(z, got.ids), got.logprobs)
    assert torch.equal(rk.logp(x, got.ids), got.raw_logprobs)


def test_a_graph_that_is_replayed_reads_new_logits_and_settings():
    t = 32
    inputs = [(rows(t, V, seed=s).cuda(), *on_gpu(*of_requests(t, s))) for s in (5, 6, 7)]
    settings = mixed(t)
    held = [y.clone() for y in inputs[0]]
    limits = {name: y.clone() for name, y in settings.items()}
    rk.sample(*held, **limits, raw_logprobs=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = rk.sample(*held, **limits, raw_logprobs=True)
    for i, new in enumerate(inputs):
        for name, y in settings.items():
            limits[name].copy_(y.roll(i))
        for old, y in zip(held, new, strict=True):
            old.copy_(y)
        eager = rk.sample(*held, **limits, raw_logprobs=True)
        for _ in range(3):
            graph.replay()
            assert same(result, eager)


def test_nothing_waits_for_the_gpu():
    x, where, settings = rows(8, V).cuda(), on_gpu(*of_requests(8)), mixed(8)
    rk.sample(x, *where, **settings)
    torch.cuda.set_sync_debug_mode("error")
    try:
        rk.sample(x, *where, **settings)
        rk.kept_tokens(x, **settings)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.7, "top_k": 12}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str
)
def test_the_distribution_of_a_million_draws(settings):
    v, count = 23, 1_000_000
    x = torch.randn(v, generator=torch.Generator().manual_seed(1)) * 1.5
    keys = torch.full((count,), 11, device="cuda")
    positions = torch.arange(count, device="cuda")
    ids = rk.sample(x.cuda().expand(count, -1), keys, positions, **settings).ids.cpu()
    assert not improbable(torch.bincount(ids, minlength=v), sample_ref(x, **settings) * count)
    if not settings:  # neighbours are independent, and the control is seen
        p = sample_ref(x)
        pairs = torch.bincount(ids[:-1] * v + ids[1:], minlength=v * v)
        expected = (p[:, None] * p[None, :]).flatten() * (count - 1)
        assert not improbable(pairs, expected)
        assert improbable(torch.bincount(ids, minlength=v), sample_ref(x * 1.02) * count)


@pytest.mark.parametrize("settings", [{"top_k": 70_001}, {"top_p": 0.5}, {"min_p": 0.5}], ids=str)
def test_a_row_of_equal_logits(settings):
    """More ties than a list holds: they are kept from the first column on."""
    x = torch.zeros(3, V, device="cuda")
    x[1, 5::7] = -math.inf
    kept = rk.kept_tokens(x, **settings).cpu()
    candidates = [int((row > -math.inf).sum()) for row in x]
    for row, count, mask in zip(x.cpu(), candidates, kept, strict=True):
        size = {"top_k": min(count, 70_001), "top_p": -(-count // 2), "min_p": count}
        columns = (row > -math.inf).nonzero().flatten()[: size[next(iter(settings))]]
        assert torch.equal(mask.nonzero().flatten(), columns)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_without_a_distribution_has_no_token(bad):
    x, where = rows(4, V, seed=9).cuda(), on_gpu(*of_requests(4, 9))
    for settings in SETTINGS:
        good = rk.sample(x, *where, **settings)
        broken = x.clone()
        broken[1, 100_000], broken[3] = bad, -math.inf
        got = rk.sample(broken, *where, **settings)
        assert got.ids[1::2].tolist() == [-1, -1]
        assert bool(got.logprobs[1::2].isnan().all())
        assert same(picked(got, [0, 2]), picked(good, [0, 2]))
