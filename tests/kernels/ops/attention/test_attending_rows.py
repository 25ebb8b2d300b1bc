"""Which queries the backward visits for a block of keys, and for which it looks at no mask."""

import itertools

import pytest
import torch
import triton
import triton.language as tl
from rlk_kernels.ops.attention.order import attending_rows

BN, BM = 8, 4


@triton.jit
def _kernel(
    out_ptr, first_key, len_q, len_k, window, BN: tl.constexpr, BM: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    begin, end, plain_begin, plain_end = attending_rows(
        first_key, len_q, len_k, window, BN, BM, CAUSAL, WINDOWED
    )
    tl.store(out_ptr, begin)
    tl.store(out_ptr + 1, end)
    tl.store(out_ptr + 2, plain_begin)
    tl.store(out_ptr + 3, plain_end)


def sees(query, key, len_q, len_k, window, causal):
    last = query + len_k - len_q if causal else len_k - 1
    return key <= last and (window is None or key > last - window)


@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize("causal", [True, False])
def test_every_attending_query_is_visited_and_every_mask_applied(causal, window):
    for len_q, len_k in itertools.product((1, 4, 11, 60), (1, 8, 19, 62)):
        for first_key in range(0, len_k, BN):
            bounds = torch.zeros(4, dtype=torch.int32)
            _kernel[(1,)](
                bounds, first_key, len_q, len_k, window or 0, BN, BM, causal, window is not None
            )
            begin, end, plain_begin, plain_end = bounds.tolist()
            keys = range(first_key, min(first_key + BN, len_k))
            for query in range(len_q):
                visible = [sees(query, key, len_q, len_k, window, causal) for key in keys]
                case = (len_q, len_k, first_key, query)
                assert begin <= query // BM < end or not any(visible), case
                assert all(visible) or not plain_begin <= query < plain_end, case
            if causal and window is None and len_q == len_k and first_key + BN < len_q:
                assert plain_begin < plain_end == len_q  # most rows need no mask
