"""The ranks of one engine: how they join their process group, and what they gather."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rlk_align.errors import BadOption, EngineFailed, MissingDependency


@dataclass(frozen=True, slots=True)
class Ranks:
    """The rank of this process among all ranks of the engine, or within a group of them."""

    rank: int
    world: int
    device: torch.device
    group: Any = None
    """Torch's process group; None is the default group, which has all ranks."""


ALONE = Ranks(0, 1, torch.device("cpu"))


def check_device(device: str | None) -> None:
    """Raises BadOption for an unknown device, MissingDependency for one that this machine lacks.

    For None, CUDA is not touched, because some engines must be the first to initialise it.
    """
    kind, _, number = (device or "cpu").partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()):
        raise BadOption(f"device={device} is unknown", "choose cpu, cuda or cuda:N")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise MissingDependency(
            f"device={device}: torch {torch.__version__} sees {torch.cuda.device_count()} GPUs",
            "install a torch for CUDA and a driver for it, or choose device=cpu",
        )


def join(device: str | None, timeout: float) -> Ranks:
    """Joins the process group that torchrun's environment describes, or creates one of one rank.

    CPUs use gloo; GPUs use NCCL, and gloo for tensors on the host. `timeout`: seconds without
    progress after which the parent ends the ranks. Raises MissingDependency if torch lacks the
    backend, EngineFailed if the ranks cannot connect.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    kind = (device or ("cuda" if torch.cuda.is_available() else "cpu")).partition(":")[0]
    needed = ["gloo"] if kind == "cpu" else ["gloo", "nccl"]
    present = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    for backend in needed:
        if not present[backend]:
            raise MissingDependency(
                f"torch {torch.__version__} has no {backend}, with which {kind} ranks communicate",
                f"install a torch with {backend}"
                + ("" if kind == "cpu" else ", or use device=cpu"),
            )
    if kind != "cpu" and torch.cuda.device_count() < world:
        raise MissingDependency(
            f"{world} ranks need {world} GPUs; {torch.cuda.device_count()} are visible",
            "lower tp or dp, or choose device=cpu",
        )
    here = torch.device("cpu") if kind == "cpu" else torch.device("cuda", rank)
    if here.type == "cuda":
        torch.cuda.set_device(here)
    backend = "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl"
    # Longer than the parent waits: only the parent can tell which rank holds up the others.
    wait = timedelta(seconds=2 * timeout + 60)
    try:
        if world == 1:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        else:
            dist.init_process_group(backend, timeout=wait)
        dist.barrier()
    except (RuntimeError, ValueError) as error:
        raise EngineFailed(
            f"rank {rank} of {world} could not join the others: {error}",
            "ranks connect through 127.0.0.1; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose "
            "another network interface",
        ) from error
    return Ranks(rank, world, here)


def gather(local: torch.Tensor, ranks: Ranks) -> list[torch.Tensor] | None:
    """The tensors of these ranks, all of one shape, on the first rank; None on the others."""
    if ranks.world == 1:
        return [local]
    local = local.contiguous()
    parts = [torch.empty_like(local) for _ in range(ranks.world)] if ranks.rank == 0 else None
    dist.gather(local, parts, group=ranks.group, group_dst=0)
    return parts


def all_gather(local: torch.Tensor, ranks: Ranks) -> list[torch.Tensor]:
    """The tensors of all of these ranks, in rank order, on every rank."""
    if ranks.world == 1:
        return [local]
    local = local.contiguous()
    parts = [torch.empty_like(local) for _ in range(ranks.world)]
    dist.all_gather(parts, local, group=ranks.group)
    return parts


def destroy_process_group() -> None:
    """Ends the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def barrier(ranks: Ranks) -> None:
    """Waits for every rank."""
    if ranks.world > 1:
        dist.barrier()
