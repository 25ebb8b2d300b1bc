"""The processes of one engine, and how they join."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rlk_align.errors import BadOption, EngineFailed, MissingDependency


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the engine's, or among some of them."""

    rank: int
    world: int
    device: torch.device
    group: Any = None
    """torch's process group of them; None is that of all."""


ALONE = Ranks(0, 1, torch.device("cpu"))


def check_device(device: str | None) -> None:
    """Raises BadOption for what is not a device, MissingDependency for one that this machine lacks.

    None asks nothing of CUDA, which some engines must be the first to start.
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
    """Joins the process group that torchrun's environment describes, or makes one of its own.

    gloo on CPUs; on GPUs NCCL, and gloo for what lies on the host. Raises MissingDependency
    where torch has no such backend, EngineFailed where the ranks do not meet.
    `timeout`: seconds after which the parent gives up ranks that stand still.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    kind = (device or ("cuda" if torch.cuda.is_available() else "cpu")).partition(":")[0]
    needed = ["gloo"] if kind == "cpu" else ["gloo", "nccl"]
    present = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    for backend in needed:
        if not present[backend]:
            raise MissingDependency(
                f"torch {torch.__version__} has no {backend}, by which ranks on {kind} communicate",
                "install a torch with it, or choose device=cpu"
                if kind != "cpu"
                else "install a torch with it",
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
    # Longer than the parent waits: it sees all ranks, and can say which one holds the others up.
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
            "ranks meet on 127.0.0.1; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name an interface",
        ) from error
    return Ranks(rank, world, here)


def gather(local: torch.Tensor, ranks: Ranks) -> list[torch.Tensor] | None:
    """The tensors of all of these ranks, equal in shape, in rank order: on the first of them; None
    elsewhere."""
    if ranks.world == 1:
        return [local]
    local = local.contiguous()
    parts = [torch.empty_like(local) for _ in range(ranks.world)] if ranks.rank == 0 else None
    dist.gather(local, parts, group=ranks.group, group_dst=0)
    return parts


def all_gather(local: torch.Tensor, ranks: Ranks) -> list[torch.Tensor]:
    """The same on every rank."""
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
