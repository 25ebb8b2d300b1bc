"""Several ranks on this machine: processes forked from the test's, which talk over gloo."""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def on_ranks(
    world: int, function: Callable[..., Any], *args: Any, killed: tuple[int, ...] = ()
) -> list[Any]:
    """What `function(group, *args)` returns on each of `world` ranks, in rank order; None for
    those that it kills."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank, args=(rank, world, Path(folder), function, args))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(180)
            process.kill()
        files = [Path(folder) / str(rank) for rank in range(world)]
        results = [torch.load(f, weights_only=False) if f.exists() else None for f in files]
    failed = [
        r for rank, r in enumerate(results) if not isinstance(r, tuple) and rank not in killed
    ]
    assert not failed, "\n".join(str(text) for text in failed)
    assert all(results[rank] is None for rank in killed)
    return [None if r is None else r[0] for r in results]


def _rank(rank: int, world: int, folder: Path, function: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(folder / "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        result: Any = (function(dist.group.WORLD, *args),)
    except Exception:
        result = f"rank {rank}: {traceback.format_exc()}"
    torch.save(result, folder / f"{rank}.part")
    (folder / f"{rank}.part").rename(folder / str(rank))
    os._exit(0)
