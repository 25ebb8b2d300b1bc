"""1000 random cases: a row keeps its bits in any batch, packing, padding and slot."""

import rlk_kernels as rk
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_suite import differing_rows, packed, paged_cache, row_operators

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
OPERATORS = {d: row_operators(d, "cpu", size=40) for d in DTYPES}
BATCHES = {
    (d, name): op.make(67) for d, operators in OPERATORS.items() for name, op in operators.items()
}
"""One batch of 67 rows an operator; the cases draw rows from it."""


@settings(max_examples=850, deadline=None, derandomize=True, database=None)
@given(
    dtype=st.sampled_from(DTYPES),
    name=st.sampled_from(list(OPERATORS[torch.float32])),
    rows=st.lists(st.integers(0, 66), min_size=1, max_size=67),
)
def test_a_row_keeps_its_bits_in_any_selection(dtype, name, rows):
    """Any order, any number, repeated rows: shifted, permuted, packed with other rows."""
    op = OPERATORS[dtype][name]
    assert differing_rows(op, "torch", BATCHES[dtype, name], torch.tensor(rows)) == 0


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    dtype=st.sampled_from(DTYPES),
    lens=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    page=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([None, 5]),
    cut=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_attention_keeps_its_bits_packed_alone_paged_and_chunked(
    dtype, lens, page, window, cut, seed
):
    q, k, v, cu, _ = packed(lens, lens, 4, 2, 16, dtype, "cpu", seed=seed)
    whole = rk.attention(q, k, v, cu, cu, window=window)
    b = seed % len(lens)
    n, begin = lens[b], int(cu[b])
    part = slice(begin, begin + n)
    one = torch.tensor([0, n])
    assert torch.equal(
        rk.attention(q[part], k[part], v[part], one, one, window=window), whole[part]
    )
    done = [int(cut * m) for m in lens]  # cached already; the rest comes as one chunk each
    rows = [torch.arange(int(cu[i]) + done[i], int(cu[i]) + m) for i, m in enumerate(lens)]
    k_cache, v_cache, table, context = paged_cache(k, v, cu, page, seed=seed)
    index = torch.cat(rows)
    out = rk.paged_attention(
        q[index], k_cache, v_cache, table, context, window=window,
        cu_seqlens_q=torch.tensor([0, *[r.numel() for r in rows]]).cumsum(0),
    )  # fmt: skip
    assert torch.equal(out, whole[index])
