"""On a GPU: decode of one sequence, which whoever ends last merges, and of few."""

import pytest
import rlk_kernels as rk
import torch
from kernel_suite import packed, same
from rlk_kernels.ops.attention import forward as attention_forward
from rlk_kernels.ops.attention.call import AttentionCall
from schedule_suite import wide_batch

HEADS = [(32, 8, 128), (16, 8, 64), (40, 2, 128)]
LENGTHS = [
    [1], [512], [1025], [4096], [40000], [5, 3000, 1024, 1025], [0, 7, 9000, 20], [4096] * 16,
    [30 * i for i in range(64)],
]  # fmt: skip


def paged(lens_q, lens_k, shape, width=8192):
    """Inputs of `forward`; the table is `width` blocks wider than it must be."""
    batch = wide_batch(lens_q, lens_k, width, shape, 16, torch.bfloat16, "cuda")
    q, k_cache, v_cache, table, context, cu_q = batch
    return [q, k_cache, v_cache, cu_q, context, table]


def forward(x, window=None, causal=True, **schedule):
    scale = x[0].shape[2] ** -0.5
    keeps_lse = schedule.pop("keeps_lse", True)
    call = AttentionCall(*x, causal, scale, window, keeps_lse=keeps_lse)
    return attention_forward.forward(call, **schedule)[:2]


def scheduled(x, schedule, window=None):
    q, k_cache, v_cache, cu_q, context, table = x
    return rk.paged_attention(
        q, k_cache, v_cache, table, context, cu_seqlens_q=cu_q, scale=q.shape[2] ** -0.5,
        window=window, return_lse=True, schedule=schedule,
    )  # fmt: skip


def made(x, window=None):
    q, k_cache, v_cache, cu_q, context, table = x
    return rk.paged_schedule(q, k_cache, v_cache, table, context, cu_seqlens_q=cu_q, window=window)


def layers(x, count=3):
    """The same tables and lengths over other keys."""
    return [[x[0], x[1] * 0.5**i, x[2], *x[3:]] for i in range(count)]


@pytest.mark.parametrize("shape", HEADS)
def test_few_sequences_have_the_bits_of_one_walk(shape):
    for lens in LENGTHS:
        x = paged([1] * len(lens), lens, shape)
        one = forward(x, split=False)
        for _ in range(5):
            assert same(forward(x), one), lens
        assert torch.equal(forward(x, keeps_lse=False)[0], one[0]), lens


@pytest.mark.parametrize("window", [None, 300])
def test_rows_of_one_sequence_have_the_bits_of_one_walk(window):
    """Of several queries; over keys that are not paged, all of which are seen."""
    for queries, keys in ((1, 5000), (2, 1030), (3, 20000), (4, 2)):
        x = paged([queries], [keys], HEADS[0])
        one = forward(x, split=False, window=window)
        assert same(forward(x, window=window), one), (queries, keys)
        q, k, v, cu_q, cu_k = packed([queries], [keys], *HEADS[0], torch.bfloat16, "cuda")
        y = [q, k, v, cu_q.int(), cu_k.int(), None]
        assert same(forward(y, window=window), one), (queries, keys)
        one = forward(y, split=False, window=window, causal=False)
        assert same(forward(y, split=True, window=window, causal=False), one), (queries, keys)


@pytest.mark.parametrize("members", [2, 8, 16])
@pytest.mark.parametrize("shape", [*HEADS[:2], (32, 4, 128)])
def test_a_group_on_one_prompt_has_the_bits_of_sequences_apart(shape, members):
    for prompt, extra in ((1024, 0), (4096, 500), (3072, 3000)):
        lens = [prompt + (extra * i) // 16 for i in range(16)]
        x = paged([1] * 16, lens, shape)
        for b in range(16):
            x[5][b, : prompt // 16] = x[5][b // members * members, : prompt // 16]
        one = forward(x, split=False)
        for _ in range(5):
            assert same(forward(x), one), (prompt, extra)
        for rows, specialized in ((16, False), (128, None)):
            options = {"rows": rows, "split": True, "warp_specialized": specialized}
            assert same(forward(x, **options), one), (prompt, extra, rows)


def test_calls_on_several_streams_do_not_meet():
    streams = [torch.cuda.Stream() for _ in range(3)]
    batches = [paged([1] * len(n), n, HEADS[0]) for n in ([30000], [5000, 9000], [4096] * 8)]
    expected = [forward(x, split=False) for x in batches]
    torch.cuda.synchronize()
    outputs = []
    for _ in range(30):
        for stream, x, one in zip(streams, batches, expected, strict=True):
            with torch.cuda.stream(stream):
                outputs.append((forward(x), one))
    torch.cuda.synchronize()
    assert all(same(a, b) for a, b in outputs)


@pytest.mark.parametrize("count", [1, 16])
def test_graphs_replay_with_contexts_that_grow(count):
    x = paged([1] * count, [9000] * count, HEADS[0], 2500)
    forward(x)
    torch.cuda.synchronize()
    graphs, outputs = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            outputs.append(forward(x))
    for most in (1, 17, 1024, 1025, 5000, 9000, 3, 9000):
        x[4].copy_(torch.randint(1, most + 1, (count,)))
        one = forward(x, split=False)
        streams = [torch.cuda.Stream() for _ in graphs]
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):  # at once
            with torch.cuda.stream(stream):
                for _ in range(3):
                    graph.replay()
        torch.cuda.synchronize()
        assert all(same(y, one) for y in outputs), most


def test_scratch_that_holds_anything_is_no_flag():
    x = paged([1], [20000], HEADS[0])
    one = forward(x, split=False)
    for value in (0, -1, 0x5EED5EED, 1, 2, 3):
        memory = torch.empty(40 << 20, dtype=torch.uint8, device="cuda").view(torch.int32)
        memory.fill_(value)
        del memory
        assert same(forward(x), one)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("shape", HEADS)
def test_layers_that_share_a_schedule_have_the_bits_of_one_walk(shape, window):
    for lens in LENGTHS:
        x = paged([1] * len(lens), lens, shape)
        schedule = made(x, window)
        assert (schedule is None) == (len(lens) == 1)
        for y in layers(x):
            one = forward(y, split=False, window=window)
            assert same(scheduled(y, schedule, window), one), lens


@pytest.mark.parametrize("count", [2, 16, 200])
def test_graphs_make_a_schedule_once_for_all_layers(count):
    """Replayed with contexts that grow and shrink: lists of another replay are not read again, also
    where few programs have work."""
    x = paged([1] * count, [3000] * count, HEADS[0], 2500)
    ys = layers(x)
    schedule = made(x)
    for y in ys:
        scheduled(y, schedule)
    torch.cuda.synchronize()
    graph, outputs = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        schedule = made(x)
        for y in ys:
            outputs.append(scheduled(y, schedule))
    del schedule
    for turn in range(60):
        most = (1, 300, 1025, 3000)[turn % 4]
        x[4].copy_(torch.randint(1, most + 1, (count,)))
        graph.replay()
        for y, out in zip(ys, outputs, strict=True):
            assert same(out, forward(y, split=False)), (turn, most)


def test_a_schedule_for_other_lengths_is_noticed():
    x = paged([1] * 8, [4000] * 8, HEADS[0])
    schedule = made(x)
    x[4].copy_(torch.tensor([4000, 3000, 2000, 1500, 1200, 1100, 1000, 900]))
    one = forward(x, split=False)
    assert not same(scheduled(x, schedule), one)
    assert same(scheduled(x, made(x)), one)
