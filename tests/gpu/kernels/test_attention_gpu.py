"""On a GPU: attention and paged attention, bit for bit."""

import pytest
import rlk_kernels as rk
import torch
from covering import pairwise
from kernel_suite import attention_within_budget, packed, paged_cache, same
from rlk_kernels.device import facts
from rlk_kernels.ops.attention import forward as attention_forward
from rlk_kernels.ops.attention.call import AttentionCall
from rlk_kernels.ops.attention.hopper import steps as hopper

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(32, 8, 128), (16, 8, 128), (8, 1, 64), (14, 2, 64), (6, 6, 80), (4, 2, 256)]


@pytest.mark.parametrize(("dtype", "shape", "window"), pairwise(DTYPES, SHAPES, [None, 200]))
def test_error_is_no_larger_than_torchs(dtype, shape, window):
    args = packed([100, 1, 333, 257], [100, 1100, 1500, 257], *shape, dtype, "cuda")
    limit = 2e-5 if dtype == torch.float32 else 1e-3
    assert attention_within_budget(args, None, True, window, limit)


@pytest.mark.parametrize(("dtype", "shape", "window"), pairwise(DTYPES, SHAPES, [None, 300]))
def test_prefill_equals_paged_decode_and_every_chunking(dtype, shape, window):
    n = 2300
    q, k, v, cu_q, cu_k = packed([n], [n], *shape, dtype, "cuda")
    whole, lse = rk.attention(q, k, v, cu_q, cu_k, window=window, return_lse=True)
    k_cache, v_cache, table, _ = paged_cache(k, v, cu_k, page=16)

    def paged(bounds, contexts, rows):
        b = len(contexts)
        return rk.paged_attention(
            q[rows], k_cache, v_cache, table.expand(b, -1),
            torch.tensor(contexts, device="cuda"), window=window, return_lse=True,
            cu_seqlens_q=torch.tensor(bounds, device="cuda"),
        )  # fmt: skip

    at = [0, 1, 15, 16, 17, 63, 64, 127, 128, 129, 1000, 1023, 1024, 1025, 2047, 2048, 2049, n - 1]
    rows = torch.tensor(at, device="cuda")
    out, part = paged(list(range(len(at) + 1)), [p + 1 for p in at], rows)  # decode, one batch
    assert torch.equal(out, whole[rows])
    assert torch.equal(part, lse[:, rows])
    for chunk in (1, 7, 128, 1000, 1024, 1025):  # chunked prefill: the last part of two
        for end in (chunk, 1024 + chunk, n):
            rows = torch.arange(end - chunk, end, device="cuda")
            out, _ = paged([0, chunk], [end], rows)
            assert torch.equal(out, whole[rows]), (chunk, end)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunked_at_every_boundary(dtype, window):
    n = 1100  # crosses a chunk of 1024 keys
    q, k, v, cu_q, cu_k = packed([n], [n], 8, 2, 128, dtype, "cuda")
    whole = rk.attention(q, k, v, cu_q, cu_k, window=window)
    k_cache, v_cache, table, context = paged_cache(k, v, cu_k, page=16)
    for cut in range(1, n):
        first, second = (torch.tensor([0, m], device="cuda") for m in (cut, n - cut))
        head = rk.attention(q[:cut], k[:cut], v[:cut], first, first, window=window)
        rest = rk.paged_attention(
            q[cut:], k_cache, v_cache, table, context, cu_seqlens_q=second, window=window
        )
        assert torch.equal(head, whole[:cut]), cut
        assert torch.equal(rest, whole[cut:]), cut


LENGTHS = [
    ([100, 1, 333, 257], [100, 1100, 1500, 257]),
    ([5, 0, 64, 3], [0, 7, 64, 2500]),
    ([1, 1, 1], [1, 1025, 3000]),
]


def forward(q, k, v, cu_q, lens_k, table=None, causal=True, window=None, **schedule):
    call = AttentionCall(
        q, k, v, cu_q.int(), lens_k.int(), table, causal, q.shape[2] ** -0.5, window
    )
    return attention_forward.forward(call, **schedule)[:2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_scheduling_changes_no_bit(dtype):
    args = packed([100, 1300, 1], [100, 2500, 3000], 8, 2, 128, dtype, "cuda")
    reference = rk.attention(*args, return_lse=True)
    for r in (16, 64) if dtype == torch.float32 else (16, 32, 64, 128):
        for split in (True, False):
            assert same(forward(*args, rows=r, split=split, warp_specialized=False), reference), (
                r,
                split,
            )


@pytest.fixture
def taken(monkeypatch):
    """Whether each call took the kernels for Hopper."""
    if not facts(torch.device("cuda:0")).gluon:
        pytest.skip("hopper.py is for Hopper and the Triton of device.GLUON_TRITON")
    decisions = []
    reads = hopper.can_read

    def spy(*args):
        decisions.append(reads(*args))
        return decisions[-1]

    monkeypatch.setattr(hopper, "can_read", spy)
    yield decisions
    assert decisions
    assert all(decisions)


@pytest.mark.parametrize(
    ("dtype", "shape", "window", "causal"),
    pairwise(
        DTYPES[:2], [(8, 2, 128), (14, 2, 64), (6, 2, 128), (8, 4, 256)], [None, 200], [True, False]
    ),
)
def test_copies_in_a_warp_of_their_own_change_no_bit(dtype, shape, window, causal, taken):
    for lens in LENGTHS:
        q, k, v, cu_q, cu_k = packed(*lens, *shape, dtype, "cuda")
        options = {"window": window, "causal": causal}
        plain = forward(q, k, v, cu_q, cu_k, rows=64, warp_specialized=False, **options)
        assert same(forward(q, k, v, cu_q, cu_k, **options), plain)
        for rows, split in ((64, False), (64, True), (128, False), (128, True)):
            got = forward(
                q, k, v, cu_q, cu_k, rows=rows, split=split, warp_specialized=True, **options
            )
            assert same(got, plain), (rows, split)
        for page in (8, 16, 256) if causal else ():
            k_cache, v_cache, table, lens_k = paged_cache(k, v, cu_k, page=page)
            paged = (q, k_cache, v_cache, cu_q, lens_k, table.int())
            assert same(forward(*paged, window=window), plain), page


@pytest.mark.parametrize("group", [2, 8])
@pytest.mark.parametrize("window", [None, 1500])
def test_pieces_of_heads_of_256_change_no_bit(window, group, taken):
    for queries, keys in (
        ([1, 1, 1], [1, 1025, 3000]), ([1] * 40, [1100] * 40), ([1], [2048]), ([700], [2900]),
        ([3000, 1, 40, 0, 2100], [5000, 900, 40, 0, 2100]), ([300] * 70, [300] * 70),
    ):  # fmt: skip
        q, k, v, cu_q, cu_k = packed(queries, keys, 2 * group, 2, 256, torch.bfloat16, "cuda")
        plain = forward(q, k, v, cu_q, cu_k, rows=64, warp_specialized=False, window=window)
        k_cache, v_cache, table, lens_k = paged_cache(k, v, cu_k, page=16)
        call = AttentionCall(
            q, k_cache, v_cache, cu_q.int(), lens_k.int(), table.int(), True, 1 / 16, window
        )
        *got, implementation = attention_forward.forward(call)
        assert implementation == "triton/hopper"
        assert same(got, plain), (queries, keys)


@pytest.mark.parametrize("window", [None, 1500])
@pytest.mark.parametrize("shape", [(32, 8, 128), (32, 8, 64), (14, 2, 64), (16, 16, 128)])
def test_more_blocks_of_rows_than_processors_change_no_bit(shape, window, taken):
    for lens in ([3000, 1, 5000, 700, 0, 2100], [65] * 300):
        args = packed(lens, lens, *shape, torch.bfloat16, "cuda")
        plain = forward(*args, window=window, rows=64, warp_specialized=False)
        for rows in (None, 64, 128):
            for _ in range(5):  # who takes which block is never the same
                got = forward(*args, window=window, rows=rows, split=False, warp_specialized=True)
                assert same(got, plain), (lens[0], rows)


def test_slices_of_one_tensor_are_read_where_they_lie(taken):
    qkv = torch.randn(700, 12, 128, device="cuda", dtype=torch.bfloat16)
    cu = torch.tensor([0, 300, 700], device="cuda")
    q, k, v = qkv[:, :8], qkv[:, 8:10], qkv[:, 10:]
    dense = [x.contiguous() for x in (q, k, v)]
    assert same(forward(q, k, v, cu, cu), forward(*dense, cu, cu, rows=64, warp_specialized=False))


def test_unaligned_queries_change_no_bit(taken):
    q, k, v, cu, _ = packed([300, 400], [300, 400], 8, 2, 128, torch.bfloat16, "cuda")
    want = forward(q, k, v, cu, cu)
    memory = torch.empty(1 + q.numel(), device="cuda", dtype=q.dtype)
    wide = torch.empty(700, 8 * 128 + 1, device="cuda", dtype=q.dtype)
    for other in (memory[1:].view(q.shape), wide[:, : 8 * 128].view(q.shape)):
        other.copy_(q)
        assert same(forward(other, k, v, cu, cu), want)
        assert same(forward(q, k, v, cu, cu), want)  # of one shape, and of other strides


@pytest.mark.parametrize("page", [4, 24])
def test_pages_that_do_not_fill_a_block_take_the_other_kernel(page):
    q, k, v, cu, _ = packed([333, 1200], [333, 1200], 8, 2, 128, torch.bfloat16, "cuda")
    k_cache, v_cache, table, lens = paged_cache(k, v, cu, page=page)
    got = forward(q, k_cache, v_cache, cu, lens, table.int())
    assert same(got, forward(q, k, v, cu, cu))


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_what_is_not_finite_behind_a_sequence_does_not_reach_it(dtype):
    q, k, v, cu, _ = packed([333, 200], [333, 200], 8, 2, 128, dtype, "cuda")
    whole = rk.attention(q, k, v, cu, cu)
    for x in (q, k, v):
        x[333:] = float("nan")
    assert torch.equal(rk.attention(q, k, v, cu, cu)[:333], whole[:333])


PAGED = [
    ([1] * 6, [0, 3000, 1025, 2048, 7, 5000]),
    ([1, 70, 0, 5, 300], [9000, 1600, 40, 3, 300]),
    ([1] * 40, [97 * i for i in range(40)]),
    ([1], [6000]),
    ([3], [2100]),
    ([1, 4, 2], [700, 1024, 30]),
    ([400, 1], [2500, 1200]),  # with a window, rows that see nothing of a piece's chunks
]


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("shape", [(32, 8, 128), (14, 2, 64), (6, 6, 80)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lists_of_pieces_change_no_bit_in_any_table_and_any_scratch(
    dtype, shape, window, monkeypatch
):
    for lens in PAGED:
        q, k, v, cu_q, cu_k = packed(*lens, *shape, dtype, "cuda")
        k_cache, v_cache, table, context = paged_cache(k, v, cu_k, page=16)
        wide = torch.full((len(context), 8192), 1 << 30, dtype=torch.int32, device="cuda")
        wide[:, : table.shape[1]] = table
        one = forward(q, k_cache, v_cache, cu_q, context, table, window=window, split=False)
        for scratch in (31 << 20, 1 << 19):
            monkeypatch.setattr(attention_forward, "SCRATCH_BYTES", scratch)
            for rows in (None, 64, 128):
                got = forward(
                    q, k_cache, v_cache, cu_q, context, wide, window=window, split=True, rows=rows
                )
                assert same(got, one), (lens, scratch, rows)
