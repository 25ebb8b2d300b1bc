"""Which of its ways attention takes on an H200, from shapes alone."""

import pytest
import torch
from planning import H200
from rlk_kernels.ops.attention import forward as attention_forward
from rlk_kernels.ops.attention.call import AttentionCall, AttentionPlan


def planned(
    q: torch.Tensor, k: torch.Tensor, table: torch.Tensor | None, batch: int,
    window: int | None = None,
) -> AttentionPlan:  # fmt: skip
    bounds = torch.zeros(batch + 1, dtype=torch.int32)
    call = AttentionCall(q, k, k, bounds, bounds[1:], table, True, 0.1, window)
    return attention_forward._plan(call, None, None, True)


@pytest.mark.parametrize(
    ("tokens", "batch", "heads", "dim", "alone"),
    [
        (1, 1, (32, 8), 128, True),
        (3, 1, (32, 8), 128, True),
        (5, 1, (32, 8), 128, False),  # 20 rows
        (1, 1, (40, 2), 128, False),
        (1, 1, (16, 8), 64, False),
        (2, 2, (32, 8), 128, False),
    ],
)
@pytest.mark.parametrize("width", [1024, 40960])
def test_few_rows_of_one_sequence_are_taken_alone(
    tokens, batch, heads, dim, alone, width, monkeypatch
):
    monkeypatch.setattr(attention_forward, "facts", lambda device: H200)
    q = torch.empty(tokens, heads[0], dim, dtype=torch.bfloat16)
    cache = torch.empty(4, 16, heads[1], dim, dtype=torch.bfloat16)
    table = torch.empty(batch, width // 16, dtype=torch.int32)
    plan = planned(q, cache, table, batch)
    assert plan.alone == alone
    assert plan.split == (width > 1024)
    assert plan.listed == (plan.split and batch > 1)


@pytest.mark.parametrize(
    ("tokens", "batch", "heads", "window", "merged"),
    [
        (2048, 1, (32, 8), None, False),  # 512 blocks of rows, of which none would be divided
        (2048, 1, (8, 4), None, True),  # 128 of them
        (2048, 1, (8, 4), 1024, False),
        (2048, 1, (8, 4), 1025, True),
        (2048, 16, (32, 8), None, True),  # one sequence may be longer than the others
        (2048, 16, (32, 8), 1024, False),
        (4, 1, (8, 4), 1024, True),  # few rows
        (64, 64, (8, 4), 1024, True),
    ],
)
def test_nothing_is_merged_where_no_row_has_two_pieces(
    tokens, batch, heads, window, merged, monkeypatch
):
    monkeypatch.setattr(attention_forward, "facts", lambda device: H200)
    q = torch.empty(tokens, heads[0], 256, dtype=torch.bfloat16, device="meta")
    cache = torch.empty(4, 16, heads[1], 256, dtype=torch.bfloat16, device="meta")
    table = torch.empty(batch, 2560, dtype=torch.int32, device="meta")
    plan = planned(q, cache, table, batch, window)
    assert plan.split
    assert plan.merged == merged
    assert (plan.target == 1) != merged


@pytest.mark.parametrize(("stride", "special"), [((1 << 26) - 1, True), (1 << 26, False)])
def test_heads_beyond_32_bits_are_not_for_the_kernels_of_hopper(stride, special, monkeypatch):
    monkeypatch.setattr(attention_forward, "facts", lambda device: H200)
    q = torch.empty_strided((4, 32, 128), (128, stride, 1), dtype=torch.bfloat16, device="meta")
    k = torch.empty(4, 8, 128, dtype=torch.bfloat16, device="meta")
    assert planned(q, k, None, 1).special == special


@pytest.mark.parametrize(("tokens", "split"), [(1 << 20, True), (1 << 21, False)])
def test_more_work_than_a_list_counts_is_not_split(tokens, split, monkeypatch):
    monkeypatch.setattr(attention_forward, "facts", lambda device: H200)
    q = torch.empty(tokens, 128, 128, dtype=torch.bfloat16, device="meta")
    cache = torch.empty(tokens // 16, 16, 8, 128, dtype=torch.bfloat16, device="meta")
    table = torch.empty(1, tokens // 16, dtype=torch.int32, device="meta")
    assert planned(q, cache, table, 1).split == split
