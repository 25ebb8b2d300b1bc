"""PeerGather: an all-gather of columns by stores into the memory of other GPUs.

Made once for a group of ranks on one machine whose GPUs can access each other. Calls may be
captured in CUDA graphs. All calls of one PeerGather must have one order on every rank, as on one
stream: use two for two streams.

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
"""Bytes of all ranks' shards together: words are counted in 32 bits."""
SECONDS = 120.0
"""How long a rank is waited for: longer than another's kernels take to compile."""
POLLS_PER_SECOND = 4_400_000
"""About how often a program polls a flag, measured on an H100."""
_on_triton = lazy_module("rlk_kernels.parallel.peer.kernels")
_numbers = itertools.count()
_living: "WeakValueDictionary[int, PeerGather]" = WeakValueDictionary()
"""Every PeerGather, by a number: a custom operator can be given a number."""


class PeerGather:
    """See the file; `peer_gather` makes it."""

    def __init__(
        self, addresses: Sequence[int], rank: int, device: torch.device, seconds: float = SECONDS,
        zeros: Callable[..., Tensor] = torch.zeros, count: int = CHANNELS,
    ) -> None:  # fmt: skip
        """addresses: of each rank's region of `region_bytes` zeroed bytes, as this process sees
        it; zeros: what allocates on the device; count: channels, as of the regions."""
        regions = zeros(len(addresses), dtype=torch.int64, device=device)
        # Engines make models while another device is torch's default.
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
        """Whether x[..., F] can be gathered here."""
        size = x.numel() * x.element_size() * self.channels.ranks
        return 0 < size <= MOST_BYTES and x.element_size() in (2, 4, 8)

    def columns(self, x: Tensor) -> Tensor:
        """[..., R F] of x[..., F], as `copies.gather_columns`; call it on all ranks with one shape.

        Raises UnsupportedShape where `takes` is False, and RankMissing where a rank did not join
        an earlier call that has ended.
        """
        return call(_peer_columns, x, self.number, self.channels.ranks)

    def compile_for(self, columns: int, dtype: torch.dtype) -> None:
        """Compile what gathers this many columns of a rank, of any number of rows: before a CUDA
        graph is captured. Called on all ranks."""
        count = self.channels.count
        for size in (0, flagged_bytes(count), count * PIECE_BYTES[0]):
            rows = size // (columns * dtype.itemsize) + 1
            self.columns(torch.zeros(rows, columns, dtype=dtype, device=self.device))

    def check(self) -> None:
        """Raise RankMissing where a rank did not join a call that has ended, in a CUDA graph too.
        Does not wait."""
        if any(self._missing):
            ranks = ", ".join(str(r) for r, epoch in enumerate(self._missing) if epoch)
            raise RankMissing(
                f"rank {self.channels.rank} of {self.channels.ranks} waited for rank {ranks}, "
                f"which did not come to a gather within about {self.seconds:g} s: see what that "
                "process wrote last. What was gathered since is NaN"
            )

    def launch(self, x: Tensor) -> Tensor:
        """What `columns` runs."""
        self.check()
        if not self.takes(x) or x.device != self.device:
            raise UnsupportedShape(
                f"{tuple(x.shape)} {x.dtype} on {x.device} is not gathered by stores; "
                f"only 1 to {MOST_BYTES} bytes of all ranks on {self.device} are"
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
    """A PeerGather for the ranks of `group` (a CPU group, such as gloo), each with its GPU. Call it
    on all ranks; keep it as long as any graph that uses it.

    Raises UnsupportedDevice, on all ranks alike, where one cannot store to another.
    """
    places = _on_all(group, lambda: memory.place(device))
    why = _on_all(group, lambda: memory.unreachable(device, places))
    if group.size() > MOST_RANKS:
        why.append(f"{group.size()} ranks are more than {MOST_RANKS}")
    if any(why):
        raise UnsupportedDevice(f"no gathering by stores: {next(filter(None, why))}")
    rank, size = group.rank(), region_bytes(group.size())
    with torch.cuda.device(device):
        # Never freed, and not torch's: a graph may still store to it, and engines that sleep throw
        # away what they allocated.
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
    """What each rank makes, in rank order; UnsupportedDevice on all of them where one cannot."""
    try:
        mine, error = make(), ""
    except KernelFailed as failed:
        mine, error = None, str(failed)
    received: list[Any] = [None] * group.size()
    dist.all_gather_object(received, (mine, error), group=group)
    if wrong := [f"rank {r}: {text}" for r, (_, text) in enumerate(received) if text]:
        raise UnsupportedDevice(f"no gathering by stores: {'; '.join(wrong)}")
    return [made for made, _ in received]
