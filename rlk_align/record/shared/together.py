"""What the ranks of a job say to each other while they record."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from rlk_align.engines.process.ranks import Ranks
from rlk_align.errors import RlkError

T = TypeVar("T")


def of_all(ranks: Ranks, value: T) -> list[T]:
    """The value of each rank, in rank order, on every rank; called on all of them."""
    if ranks.world == 1:
        return [value]
    every: list[Any] = [None] * ranks.world
    dist.all_gather_object(every, value, group=ranks.group)
    return every


def on_all(ranks: Ranks, act: Callable[[], T]) -> T:
    """The result of `act`, which every rank calls. Where it raises an RlkError on some rank, every
    rank raises: no rank waits for one that has stopped."""
    result: Any = None
    error: RlkError | None = None
    try:
        result = act()
    except RlkError as raised:
        error = raised
    said = None if error is None else (type(error), error.message, error.fix)
    every = of_all(ranks, said)
    if error is not None:
        raise error
    for rank, of_rank in enumerate(every):
        if of_rank is not None:
            kind, message, fix = of_rank
            raise kind(f"rank {rank}: {message}", fix)
    return result


def on_first(ranks: Ranks, act: Callable[[], None]) -> None:
    """Has rank 0 act. Every rank calls this, and raises the RlkError of rank 0."""
    on_all(ranks, lambda: None if ranks.rank else act())
