"""PeerGather: an all-gather of columns by stores into the memory of other GPUs.

A PeerGather is created once for a group of ranks on one machine whose GPUs can access each other.
Its calls may be captured in CUDA graphs. All its calls must have the same order on every rank, as
on one stream; use two PeerGathers for two streams.

R = ranks   F = columns of a rank
"""

import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from rlk_kernels.custom_op import call, custom_op
from rlk_kernels.device import lazy_module
from rlk_kernels.errors import KernelFailed, RankMissing, UnsupportedDevice, UnsupportedShape
from rlk_kernels.parallel.peer import memory
from rlk_kernels.parallel.peer.channels import (
    CHANNELS,
    PIECE_BYTES,
    Channels,
    flagged_bytes,
    region_bytes,
)

MOST_RANKS = 8
MOST_BYTES = 1 << 31
"""The most bytes of all ranks' shards together, because words are counted in 32 bits."""
SECONDS = 120.0
"""How long a rank waits for another one, whose kernels may have to be compiled first."""
POLLS_PER_SECOND = 4_400_000
"""The approximate number of polls of a flag in a second, measured on an H100."""
_on_triton = lazy_module("rlk_kernels.parallel.peer.kernels")
_numbers = itertools.count()
_living: "WeakValueDictionary[int, PeerGather]" = WeakValueDictionary()
"""Number -> PeerGather, because a custom operator can take a number."""


class PeerGather:
    """See the top of this file; `peer_gather` creates it."""

    def __init__(
        self, addresses: Sequence[int], rank: int, device: torch.device, seconds: float = SECONDS,
        zeros: Callable[..., Tensor] = torch.zeros, count: int = CHANNELS,
    ) -> None:  # fmt: skip
        """addresses: those of each rank's region of `region_bytes` zeroed bytes in this process;
        zeros: allocates on the device; count: the number of channels of the regions."""
        regions = zeros(len(addresses), dtype=torch.int64, device=device)
        # Engines build models while torch's default device is another one.
        regions.copy_(torch.tensor(addresses, device="cpu"))
        missing = torch.zeros(
            len(addresses), dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda"
        )
        self.channels = Channels(
            rank=rank,
            ranks=len(addresses),
            count=count,
            polls=min(max(1, int(seconds * POLLS_PER_SECOND)), (1 << 31) - 1),
            regions=regions,
            counters=zeros(count, dtype=torch.int32, device=device),
            failed=zeros(1, dtype=torch.int32, device=device),
            missing=missing,
        )
        self.device, self.seconds = device, seconds
        self._missing = (ctypes.c_int * len(addresses)).from_address(missing.data_ptr())
        self.number = next(_numbers)
        _living[self.number] = self

    def takes(self, x: Tensor) -> bool:
        """Whether this can gather x[..., F]."""
        size = x.numel() * x.element_size() * self.channels.ranks
        return 0 < size <= MOST_BYTES and x.element_size() in (2, 4, 8)

    def columns(self, x: Tensor) -> Tensor:
        """[..., R F] from x[..., F], like `copies.gather_columns`. Call this on all ranks with the
        same shape.

        Raises UnsupportedShape if `takes` is False, and RankMissing if a rank did not join an
        earlier call that has ended.
        """
        return call(_peer_columns, x, self.number, self.channels.ranks)

    def compile_for(self, columns: int, dtype: torch.dtype) -> None:
        """Compiles the kernels for this number of columns of a rank and any number of rows. Call
        this on all ranks before a CUDA graph is captured."""
        count = self.channels.count
        for size in (0, flagged_bytes(count), count * PIECE_BYTES[0]):
            rows = size // (columns * dtype.itemsize) + 1
            self.columns(torch.zeros(rows, columns, dtype=dtype, device=self.device))

    def check(self) -> None:
        """Raises RankMissing if a rank did not join a call that has ended, also in a CUDA graph.
        Does not wait."""
        if any(self._missing):
            ranks = ", ".join(str(r) for r, epoch in enumerate(self._missing) if epoch)
            raise RankMissing(
                f"rank {self.channels.rank} of {self.channels.ranks} waited for rank {ranks}, "
                f"which did not join a gather within about {self.seconds:g} s: see the last output "
                "of that process. Values that were gathered since are NaN"
            )

    def launch(self, x: Tensor) -> Tensor:
        """The implementation of `columns`."""
        self.check()
        if not self.takes(x) or x.device != self.device:
            raise UnsupportedShape(
                f"{tuple(x.shape)} {x.dtype} on {x.device} cannot be gathered by stores; only 1 to "
                f"{MOST_BYTES} bytes of all ranks on {self.device} can"
            )
        return _on_triton().columns(x, self.channels)


@custom_op(
    "peer_columns",
    lambda x, number, ranks: x.new_empty(*x.shape[:-1], ranks * x.shape[-1]),
    no_gradient=("peer_gather", "it is for inference, and has no gradient"),
)
def _peer_columns(x: Tensor, number: int, ranks: int) -> Tensor:
    return _living[number].launch(x)


def peer_gather(
    group: dist.ProcessGroup, device: torch.device, seconds: float = SECONDS
) -> PeerGather:
    """A PeerGather for the ranks of `group` (a CPU group, such as gloo), each of which has a GPU.
    Call this on all ranks, and keep the result as long as any graph that uses it.

    Raises UnsupportedDevice on all ranks if one rank cannot store to another.
    """
    gpus = _on_all(group, lambda: memory.gpu_name(device))
    why = _on_all(group, lambda: memory.unreachable(device, gpus))
    if group.size() > MOST_RANKS:
        why.append(f"{group.size()} ranks are more than {MOST_RANKS}")
    if any(why):
        raise UnsupportedDevice(f"no gathering by stores: {next(filter(None, why))}")
    rank, size = group.rank(), region_bytes(group.size())
    with torch.cuda.device(device):
        # This memory is never freed, because a graph may still store to it, and it is not torch's,
        # because an engine that sleeps frees torch's memory.
        own = _on_all(group, lambda: memory.allocate(size))[rank]
        handles = _on_all(group, lambda: memory.handle_of(own))
        opened = _on_all(
            group,
            lambda: [own if r == rank else memory.opened(h) for r, h in enumerate(handles)],
        )
        gather = PeerGather(opened[rank], rank, device, seconds, memory.zeros)
        torch.cuda.synchronize()
    _on_all(group, lambda: None)  # all regions are zero and opened
    return gather


def _on_all(group: dist.ProcessGroup, make: Callable[[], Any]) -> list[Any]:
    """The result of `make` on each rank, in rank order. Raises UnsupportedDevice on all ranks if it
    fails on one."""
    try:
        value, error = make(), ""
    except KernelFailed as failed:
        value, error = None, str(failed)
    received: list[Any] = [None] * group.size()
    dist.all_gather_object(received, (value, error), group=group)
    if wrong := [f"rank {r}: {text}" for r, (_, text) in enumerate(received) if text]:
        raise UnsupportedDevice(f"no gathering by stores: {'; '.join(wrong)}")
    return [value for value, _ in received]
