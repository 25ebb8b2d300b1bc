"""Ranks over gloo on this machine: processes that are forked from the test's process, or this
process as the only rank."""

import faulthandler
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT = 180.0
"""Seconds within which all ranks have to end."""
LEFT = 10.0
"""Seconds that the other ranks have once a rank has failed: they may wait for it for ever."""


def on_ranks(
    world: int, function: Callable[..., Any], *args: Any, killed: tuple[int, ...] = ()
) -> list[Any]:
    """What `function(group, *args)` returns on each of `world` ranks, in rank order; None for
    those that it kills.

    Raises AssertionError with what each failing rank said, or the exit code with which it ended."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank, args=(rank, world, Path(folder), function, args))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        results = _results(processes, Path(folder), killed)
        for process in processes:
            process.kill()
            process.join()
    failed = [r for rank, r in enumerate(results) if isinstance(r, str) and rank not in killed]
    assert not failed, "\n".join(failed)
    assert all(isinstance(results[rank], str) for rank in killed)
    return [None if isinstance(r, str) else r[0] for r in results]


def _results(processes: list[Any], folder: Path, killed: tuple[int, ...]) -> list[Any]:
    """For each rank, a tuple of what it returned, or a text that says how it ended."""
    results: list[Any] = [f"rank {rank} did not end" for rank in range(len(processes))]
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    end = time.monotonic() + LIMIT
    while running and (ended := connection.wait(list(running), end - time.monotonic())):
        for sentinel in ended:
            rank = running.pop(sentinel)
            processes[rank].join()
            file = folder / str(rank)
            results[rank] = f"rank {rank} ended with exit code {processes[rank].exitcode}"
            if file.exists():
                results[rank] = torch.load(file, weights_only=False)
            if isinstance(results[rank], str) and rank not in killed:
                end = min(end, time.monotonic() + LEFT)
    return results


def _rank(rank: int, world: int, folder: Path, function: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(LIMIT - 5, file=2)
    part = folder / f"{rank}.part"
    try:
        store = dist.FileStore(str(folder / "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        torch.save((function(dist.group.WORLD, *args),), part)
    except BaseException:  # what pytest.raises and pytest.fail raise is no Exception
        torch.save(f"rank {rank}: {traceback.format_exc()}", part)
    part.rename(folder / str(rank))
    os._exit(0)


@contextmanager
def only_rank() -> Iterator[None]:
    """This process as the only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        _kept.extend(dist.distributed_c10d._world.pg_map)
        dist.destroy_process_group()


@contextmanager
def only_rank_of_megatron() -> Iterator[None]:
    """This process as the only rank, of megatron-core too."""
    from megatron.core import parallel_state

    with only_rank():
        parallel_state.initialize_model_parallel()
        yield
    # After that, because it takes groups out of torch's list.
    parallel_state.destroy_model_parallel()


_kept: list[dist.ProcessGroup] = []
"""Every group that this process made as the only rank, so that none is ever freed. Freeing a
group waits for its threads, and a rank that is forked from here has the group without them:
megatron-core's `destroy_model_parallel` leaves two behind, which are freed as others are made."""
