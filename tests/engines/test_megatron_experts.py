"""The rows of experts that ranks share, without an engine."""

from typing import Any

import pytest
import torch
from gloo_ranks import on_ranks

from rlk_align.engines.megatron.experts import own_rows
from rlk_align.engines.process.ranks import Ranks

pytestmark = pytest.mark.whole_matrix

COUNTS = (3, 5)
"""The tokens of each rank."""
SENT = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0], [0, 0, 1, 1]] * 2, dtype=torch.bool)
"""The experts of each token of both ranks, one rank after another; rank 0 has the first two."""


def value(token: int, expert: int) -> float:
    """The row of a token in an expert; `token`: among those of both ranks."""
    return 10.0 * token + expert


def _rows(group: Any) -> list[tuple[float, int, int]]:
    rank = group.rank()
    held = range(2 * rank, 2 * rank + 2)
    computed = [[value(t, e)] for e in held for t in range(len(SENT)) if SENT[t, e]]
    own = SENT.split(COUNTS)[rank]
    ranks = Ranks(rank, 2, torch.device("cpu"), group)
    rows, token, expert = own_rows(torch.tensor(computed), own, ranks)
    return list(zip(rows[:, 0].tolist(), token.tolist(), expert.tolist(), strict=True))


def test_each_rank_gets_the_rows_of_its_own_tokens_however_many_the_others_have() -> None:
    for rank, found in enumerate(on_ranks(2, _rows)):
        first = sum(COUNTS[:rank])
        expected = [
            (value(first + t, e), t, e)
            for t in range(COUNTS[rank])
            for e in range(4)
            if SENT[first + t, e]
        ]
        assert sorted(found, key=lambda row: row[1:]) == expected
