"""Which of its ways attention takes on an H200, from shapes alone."""

import pytest
import torch
from planning import H200
from rlk_kernels.ops.attention import forward as attention_forward


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
    own = attention_forward._plan(q, cache, cache, table, batch, None, None, True)
    assert own.alone == alone
    assert own.split == (width > 1024)
    assert own.listed == (own.split and batch > 1)
