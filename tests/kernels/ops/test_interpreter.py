"""The Triton kernels in Triton's CPU interpreter, fp32 and fp16, small shapes.

bf16 and the real order of a tensor core are proved on a GPU (tests/gpu/kernels).
"""

import pytest
import rlk_kernels as rk
import torch
from kernel_suite import (
    attention_within_budget,
    differing_rows,
    packed,
    paged_cache,
    row_operators,
    within_budget,
)
from rlk_kernels.device import interpreting
from rlk_kernels.ops.attention import forward
from rlk_kernels.ops.attention.call import AttentionCall
from rlk_kernels.ops.embedding import kernels as embedding

DTYPES = [torch.float16, torch.float32]
NAMES = list(row_operators(torch.float32, "cpu"))


def test_the_interpreter_is_on():
    assert interpreting(), (
        "set TRITON_INTERPRET=1 before rlk_kernels is imported for the first time"
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_rows_are_right_and_do_not_depend_on_their_batch(name, dtype):
    op = row_operators(dtype, "cpu", size=40)[name]
    rk.reset_backend_calls()
    rows = op.make(35)
    value, truth = op.run(*rows, backend="triton"), op.truth(*rows)
    assert {backend for _, backend in rk.backend_calls()} == {"triton"}
    wide = name in ("logp", "linear_fp32_out")
    assert within_budget(value, truth, op.torch_run(*rows), torch.float32 if wide else dtype)
    for m, first in ((1, 0), (1, 34), (7, 20), (33, 1)):
        assert differing_rows(op, "triton", rows, torch.arange(first, first + m)) == 0
    assert differing_rows(op, "triton", rows, torch.randperm(35)) == 0


@pytest.mark.parametrize(
    ("shape", "causal", "window"),
    [((4, 2, 16), True, None), ((3, 1, 24), True, 9), ((2, 2, 16), False, None)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_error_is_no_larger_than_torchs(dtype, shape, causal, window):
    args = packed([7, 1, 30], [7, 40, 61], *shape, dtype, "cpu")
    assert attention_within_budget(args, "triton", causal, window, 2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_equals_paged_decode_chunked_prefill_and_any_schedule(dtype, monkeypatch):
    monkeypatch.setattr(forward, "CHUNK", 64)
    n = 72  # two chunks
    q, k, v, cu_q, cu_k = packed([n], [n], 2, 1, 16, dtype, "cpu")
    whole, lse = rk.attention(q, k, v, cu_q, cu_k, return_lse=True, backend="triton")
    k_cache, v_cache, table, _ = paged_cache(k, v, cu_k, page=8)
    at = [0, 31, 63, 64, n - 1]
    out, part = rk.paged_attention(
        q[at], k_cache, v_cache, table.expand(len(at), -1), torch.tensor(at) + 1,
        cu_seqlens_q=torch.arange(len(at) + 1), return_lse=True, backend="triton",
    )  # fmt: skip
    assert torch.equal(out, whole[at])
    assert torch.equal(part, lse[:, at])
    for cut in (1, 64):
        rest = rk.paged_attention(
            q[cut:], k_cache, v_cache, table, torch.tensor([n]),
            cu_seqlens_q=torch.tensor([0, n - cut]), backend="triton",
        )  # fmt: skip
        assert torch.equal(rest, whole[cut:])
    for rows, split in ((16, True), (64, True)):
        call = AttentionCall(q, k, v, cu_q, cu_k, None, True, 0.25, None)
        got = forward.forward(call, rows=rows, split=split)
        assert torch.equal(got[0], whole)


def test_ids_outside_of_the_vocabulary_have_nan_and_no_gradient_anywhere():
    kernel = embedding._embedding_bwd_kernel
    ids = torch.tensor([2, -2, 7, 2, 5])
    value = rk.embedding(ids, torch.ones(5, 8), backend="triton")
    assert bool((value.isnan().all(1) == torch.tensor([False, True, True, False, True])).all())
    key, order = torch.sort(ids, stable=True)
    around = torch.zeros(3 + 5 + 3, 8)  # the five rows of the gradient, and what lies beside it
    kernel[(5, 1)](key, order, torch.ones(5, 8), around[3:8], 5, 8, 5, 16)
    expected = torch.zeros(11, 8)
    expected[3 + 2] = 2.0
    assert torch.equal(around, expected)
