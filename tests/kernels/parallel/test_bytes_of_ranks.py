"""The bytes that ranks receive in a row-parallel product, y[M, N] of x[M, K] on R ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from gloo_ranks import on_ranks
from rlk_kernels.parallel import collectives
from rlk_kernels.parallel.linear import row_parallel

M, K, N = 8, 24, 16


@contextmanager
def received() -> Iterator[list[float]]:
    """Bytes that this rank receives, of each collective."""
    seen, run = [], collectives._run

    def counting(what: str, name: str, start: Any, x: torch.Tensor) -> None:
        ranks = torch.distributed.get_world_size()
        seen.append(x.nbytes * (ranks - 1) / (1 if what == "all_gather" else ranks))
        run(what, name, start, x)

    with mock.patch.object(collectives, "_run", counting):
        yield seen


def _of_a_product(group: Any) -> list[float]:
    x, w = torch.ones(M, K // group.size()), torch.ones(N, K // group.size())
    with received() as seen:
        row_parallel(x.bfloat16(), w.bfloat16(), None, group)
    return seen


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_receive_the_weights_once_and_gather_inputs_and_outputs(ranks):
    """In bf16: (R - 1) / R of 2 K and of 2 N bytes a row, and of 2 K N / R bytes of weights."""
    weights, x, y = on_ranks(ranks, _of_a_product)[0]
    share = (ranks - 1) / ranks
    assert (x, y) == (share * M * 2 * K, share * M * 2 * N)
    assert weights == share * 2 * K * N / ranks
