"""On a GPU: the tokens and log-probs of `linear_sample` have the bits of `sample` of `linear`, in
any batch, in CUDA graphs, without waiting for the GPU, and without the memory of all logits.

T = rows   V = vocabulary   H = hidden size
"""

import math

import pytest
import rlk_kernels as rk
import torch
from hidden_sample_suite import Case, case
from rlk_kernels.ops.linear_sample import kernels
from sample_suite import picked, same

H, V, PADDING = 4096, 151_936, 267
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def on_gpu(t: int, dtype: torch.dtype = torch.bfloat16, h: int = H, v: int = V, **options) -> Case:
    return case(t, h, v, dtype, device="cuda", **options)


@pytest.mark.parametrize("logit_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_of_sample_of_linear(dtype, logit_dtype):
    whole = on_gpu(300, dtype, padding=PADDING, logit_dtype=logit_dtype)
    for t in (1, 2, 16, 64, 65, 128, 300):
        c = whole.rows(slice(0, t))
        got = c.fused()
        assert bool(((got.ids >= 0) & (got.ids < V - PADDING)).all())
        assert same(got, c.in_two_steps()), t


@pytest.mark.parametrize(
    ("t", "h", "v"), [(3, 100, 1), (5, 999, 17), (70, 1024, 5001), (2500, 512, 32_000)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_of_sample_of_linear_at_other_sizes(dtype, t, h, v):
    """Rows that no copy engine reads, an odd vocabulary, more rows than a call takes at a time."""
    c = on_gpu(t, dtype, h, v)
    assert same(c.fused(), c.in_two_steps())


def test_chunks_change_no_bit(monkeypatch):
    c = on_gpu(100, padding=PADDING)
    whole = c.fused()
    for nbytes, rows in ((1 << 20, 1024), (1 << 30, 1024), (4 << 20, 16)):
        monkeypatch.setattr(kernels, "LOGITS_BYTES", nbytes)
        monkeypatch.setattr(kernels, "ROWS", rows)
        assert same(c.fused(), whole), (nbytes, rows)


def test_a_row_has_the_bits_that_it_has_alone():
    c = on_gpu(256, padding=PADDING)
    whole = c.fused()
    order = torch.randperm(256, generator=torch.Generator().manual_seed(3)).cuda()
    for count in (1, 3, 7, 64, 256):
        assert same(c.rows(order[:count]).fused(), picked(whole, order[:count])), count


def test_the_log_probs_are_those_of_linear_logp():
    c = on_gpu(64)
    c.options["temperature"].fill_(1.0)
    got = c.fused()
    expected = rk.linear_logp(c.hidden, c.weight, got.ids)
    assert torch.equal(got.logprobs, expected)
    assert torch.equal(got.raw_logprobs, expected)


def test_a_graph_that_is_replayed_reads_new_rows():
    cases = [on_gpu(32, v=40_000, seed=seed) for seed in (5, 6, 7)]
    held = cases[0].rows(torch.arange(32, device="cuda"))  # a copy
    names = ("hidden", "keys", "positions")
    held.fused()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = held.fused()
    for i, new in enumerate(cases):
        for name in names:
            getattr(held, name).copy_(getattr(new, name))
        held.options["temperature"].copy_(new.options["temperature"].roll(i))
        eager = held.fused()
        for _ in range(3):
            graph.replay()
            assert same(result, eager)
    assert len({tuple(case.fused().ids.tolist()) for case in cases}) == 3


def test_nothing_waits_for_the_gpu():
    c = on_gpu(8)
    c.fused()
    torch.cuda.set_sync_debug_mode("error")
    try:
        c.fused()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_logits_are_never_all_in_memory():
    """Of 256 rows they take 156 MB."""
    c = on_gpu(256)
    c.fused()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    c.fused()
    assert torch.cuda.max_memory_allocated() - before < kernels.LOGITS_BYTES + (4 << 20)
    c.in_two_steps()
    assert torch.cuda.max_memory_allocated() - before > 150_000_000


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_without_a_distribution_has_no_token(bad):
    c = on_gpu(4)
    good = c.fused()
    c.hidden[1::2, 3] = bad
    got = c.fused()
    assert got.ids[1::2].tolist() == [-1, -1]
    assert bool(got.logprobs[1::2].isnan().all())
    assert same(picked(got, [0, 2]), picked(good, [0, 2]))
    assert got.ids.tolist() == c.in_two_steps().ids.tolist()
