"""The page of costs is what its script computes, and its bytes are those that ranks copy."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from gloo_ranks import on_ranks
from rlk_kernels.parallel import collectives
from rlk_kernels.parallel.linear import row_parallel

ROOT = Path(__file__).resolve().parents[3]
M, K, N = 8, 24, 16


@pytest.fixture(scope="module")
def costs() -> Any:
    with mock.patch.object(sys, "path", [str(ROOT / "kernels" / "bench"), *sys.path]):
        import layout_costs
    return layout_costs


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
def test_bytes_are_those_that_ranks_copy(ranks, costs):
    weights, x, y = on_ranks(ranks, _of_a_product)[0]
    assert x + y == M * costs.gathered(K, N, ranks)
    assert weights == (ranks - 1) / ranks * 2 * K * N / ranks


def test_the_page_is_what_the_script_computes(costs):
    assert (ROOT / "reports" / "layout-costs.md").read_text(encoding="utf-8") == costs.page()
