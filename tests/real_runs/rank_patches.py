"""Patches that make the last rank of an engine fail: `patch=rank_patches:NAME`.

They act in the second pass, when the first is finished and must be kept, and no longer once a
file `healed` lies in the current directory.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def _world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _in_second_pass(model: Any, act: Callable[[], object]) -> None:
    """Calls `act` in the middle of the model, in every rank."""

    def hook(_module: Any, _inputs: Any) -> None:
        finished = list(Path().glob("run/captures/[!r]*/prefill/pass.json"))
        if finished and not Path("healed").exists():
            act()

    decoder = model.model if hasattr(model, "model") else model.decoder
    decoder.layers[1].register_forward_pre_hook(hook)


def _in_last_rank(model: Any, act: Callable[[], object]) -> None:
    rank, world = _world()
    if rank == world - 1:
        _in_second_pass(model, act)


def killed(model: Any) -> None:
    _in_last_rank(model, lambda: os.kill(os.getpid(), signal.SIGKILL))


def stopped(model: Any) -> None:
    _in_last_rank(model, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def asleep(model: Any) -> None:
    def nap() -> None:
        Path("asleep").touch()
        time.sleep(1000)

    _in_last_rank(model, nap)


def out_of_memory(model: Any) -> None:
    """More than any address space holds: torch's own allocator refuses it."""
    _in_last_rank(model, lambda: torch.empty(1 << 50, dtype=torch.uint8))


def broken(model: Any) -> None:
    """An error of the user's own code, in a forward."""

    def lookup() -> None:
        raise KeyError("no such expert")

    _in_last_rank(model, lookup)


def at_cross_purposes(model: Any) -> None:
    """Rank 0 receives what rank 1, in a barrier, never sends."""

    def receive() -> None:
        dist.recv(torch.zeros(4), src=1)

    def meet() -> None:
        dist.barrier()

    _in_second_pass(model, receive if _world()[0] == 0 else meet)
