"""The two collectives by which ranks copy values, as custom operators over torch.distributed (NCCL,
gloo). A compiler can trace them, and CUDA graphs capture those of NCCL.

Every wait has the limit of the process group (`init_process_group(timeout=)`), at no extra cost for
a call.

gloo: a waiting rank checks every LOOK whether another rank has failed. The first rank that fails
(because its peer closed the connection, or at the limit) reports this in the group's store. Ranks
that do not answer there are missing, and RankMissing names them on every waiting rank.

NCCL: the host must not wait. torch's watchdog ends the process at the limit, and names the missing
ranks if TORCH_NCCL_DESYNC_DEBUG=1 is set.

R = ranks of the group
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlk_kernels import private_api
from rlk_kernels.custom_op import call, custom_op
from rlk_kernels.errors import RankMissing

LOOK = timedelta(seconds=2)
"""How long a rank waits on a CPU before it checks whether another rank has failed."""
ANSWER = timedelta(seconds=7)
"""How long waiting ranks have to answer; several times LOOK."""

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""The name in torch 2.13, or in older versions."""


COPIES = ("copies between ranks", "operators that use them have their own gradient")
"""The error of a backward through a copy."""


@custom_op("all_gather", lambda x, group, ranks: x.new_empty((ranks, *x.shape)), no_gradient=COPIES)
def _all_gather(x: Tensor, group: str, ranks: int) -> Tensor:
    x = x.contiguous()
    out = x.new_empty((ranks, *x.shape))
    _run("all_gather", group, lambda **how: _gather(out.view(-1), x.view(-1), **how), x)
    return out


@custom_op(
    "all_to_all",
    lambda parts, group: torch.empty_like(parts, memory_format=torch.contiguous_format),
    no_gradient=COPIES,
)
def _all_to_all(parts: Tensor, group: str) -> Tensor:
    parts = parts.contiguous()
    out = torch.empty_like(parts)
    exchange = dist.all_to_all_single
    _run("all_to_all", group, lambda **how: exchange(out.view(-1), parts.view(-1), **how), parts)
    return out


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[R, ...]: the x of all ranks in rank order. All have the same shape."""
    return call(_all_gather, x, group.group_name, group.size())


def all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[R, ...]: the received parts in rank order. parts[r] goes to rank r."""
    return call(_all_to_all, parts, group.group_name)


def _run(what: str, name: str, start: Callable[..., Any], x: Tensor) -> None:
    group = private_api.process_group(name)
    if x.device.type == "cpu":
        wait(start(group=group, async_op=True), x, group, what)
    else:
        start(group=group)


def wait(work: Any, x: Tensor, group: dist.ProcessGroup | None, what: str) -> None:
    """Waits for a collective on x with the name `what`. On a CPU, raises RankMissing with the names
    of missing ranks; on a GPU, the current stream waits."""
    if x.device.type != "cpu":
        work.wait()
        return
    group = dist.group.WORLD if group is None else group
    while True:
        try:
            work.wait(LOOK)
            return
        except RuntimeError as error:
            if work.is_completed():
                if work.is_success():  # it has completed since
                    return
                raise RankMissing(_report(group, what)) from error
            if _another_failed(group):
                raise RankMissing(_report(group, what)) from error


def _key(group: dist.ProcessGroup, rank: int) -> str:
    return f"rlk/failed/{group.group_name}/{rank}"


def _another_failed(group: dist.ProcessGroup) -> bool:
    store = private_api.store_of(group)
    try:
        return any(store.check([_key(group, rank)]) for rank in range(group.size()))
    except RuntimeError:
        return True  # the process of the store has ended


def _report(group: dist.ProcessGroup, what: str) -> str:
    """Reports that this rank failed, waits for the reports of the others, and returns a message
    with the missing ranks."""
    store, began = private_api.store_of(group), time.monotonic()
    silent = set(range(group.size()))
    begins = f"{what} on rank {group.rank()} of {group.size()} failed"
    try:
        store.set(_key(group, group.rank()), "")
        while silent and time.monotonic() - began < ANSWER.total_seconds():
            silent = {rank for rank in silent if not store.check([_key(group, rank)])}
            time.sleep(0.05)
    except RuntimeError as error:
        return (
            f"{begins}, and so did the store of the group, which is in rank 0 or the launcher: "
            f"look there first ({error})"
        )
    if not silent:
        return f"{begins} on all ranks: it did not complete within the group's timeout"
    ranks = ", ".join(map(str, sorted(silent)))
    return (
        f"{begins}: rank {ranks} did not join. It has ended or runs other code: see the last "
        "output of that process"
    )
