"""Collectives over real gloo: they can be traced, and if a rank has ended, the other ranks end and
name it. R = ranks"""

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import on_ranks
from rlk_kernels.errors import RankMissing
from rlk_kernels.parallel import collectives, gradients
from rlk_kernels.parallel.copies import columns_to_rows, gather_columns, gather_rows
from rlk_kernels.parallel.linear import row_parallel
from torch import Tensor

LIMIT = 20.0
"""Seconds within which the remaining ranks have to end. The limit of the group is half an hour."""


@pytest.fixture(autouse=True)
def ranks_look_often(monkeypatch):
    monkeypatch.setattr(collectives, "LOOK", timedelta(seconds=0.2))
    monkeypatch.setattr(collectives, "ANSWER", timedelta(seconds=1.5))


def _gathers(group: Any) -> None:
    gather_columns(torch.ones(4, 4), group)


def _exchanges(group: Any) -> None:
    columns_to_rows(torch.ones(group.size(), 4), group)


def _reduces(group: Any) -> None:
    gradients.reduce_scatter(torch.ones(1), torch.ones(group.size()), group=group)


def _left_alone(group: Any, run: Any, dead: int, begins: float) -> tuple[str, bool]:
    """(the error, whether it came in time) of each remaining rank."""

    def run_some() -> None:
        for _ in range(3):
            run(group)

    run_some()
    if group.rank() == dead:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankMissing) as caught:
        run_some()
    return str(caught.value), time.time() - begins < LIMIT


@pytest.mark.parametrize(
    ("ranks", "dead", "run"),
    [(2, 1, _gathers), (2, 0, _exchanges), (2, 1, _reduces), (3, 2, _gathers)],
)
def test_a_killed_rank_is_named_by_the_others(ranks, dead, run):
    results = on_ranks(ranks, _left_alone, run, dead, time.time(), killed=(dead,))
    others = [result for result in results if result is not None]
    assert len(others) == ranks - 1
    for message, in_time in others:
        assert in_time
        assert f": rank {dead} did not join" in message


def _elsewhere(group: Any) -> str:
    short = dist.new_group(timeout=timedelta(seconds=1))
    _gathers(short)
    message = "came late"
    if group.rank() == 0:
        with pytest.raises(RankMissing) as caught:
            _gathers(short)
        message = str(caught.value)
    dist.barrier(group)
    return message


def test_a_rank_that_is_elsewhere_is_named_at_the_limit_of_the_group():
    first, second = on_ranks(2, _elsewhere)
    assert ": rank 1 did not join" in first
    assert second == "came late"


def _late(group: Any) -> Tensor:
    time.sleep(0.7 * group.rank())
    return gather_rows(torch.full((1, 2), float(group.rank())), group)


def test_a_late_rank_is_waited_for():
    for rows in on_ranks(2, _late):
        assert torch.equal(rows, torch.tensor([[0.0, 0.0], [1.0, 1.0]]))


def _traced(group: Any) -> list[bool]:
    """Whether the compiled function, without a graph break, has the bits of the eager one."""
    generator = torch.Generator().manual_seed(group.rank())
    x, w = (torch.randn(s, generator=generator) for s in ((4, 8), (6, 8)))
    runs = [
        lambda x: columns_to_rows(gather_rows(x * 2, group), group),
        lambda x: row_parallel(x, w, None, group),
    ]
    equal = []
    for run in runs:
        torch._dynamo.reset()
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        equal.append(torch.equal(run(x), compiled(x)))
    return equal


def test_they_are_traced_whole():
    assert on_ranks(2, _traced) == [[True] * 2] * 2
