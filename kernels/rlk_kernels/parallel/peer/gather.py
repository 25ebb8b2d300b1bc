"""PeerGather: an all-gather for few bytes, by stores into the memory of other GPUs.

Made once for a group of ranks on one machine whose GPUs reach each other. Calls may be captured in
CUDA graphs. All calls of one PeerGather are in one order on every rank, as on one stream: two
streams want two of them.

R = ranks   F = columns of a rank
"""

import ctypes
import itertools
from collections.abc import Sequence
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from rlk_kernels.backend import call, dispatch_straight, refuse_gradient
from rlk_kernels.device import lazy_module
from rlk_kernels.errors import RankMissing, UnsupportedDevice, UnsupportedShape
from rlk_kernels.parallel.peer import memory
from rlk_kernels.parallel.peer.channels import CHANNELS, Channels, region_bytes, slot_bytes

MOST_RANKS = 8
SECONDS = 120.0
"""How long a rank is waited for: longer than another's kernels take to compile."""
POLLS_PER_SECOND = 1_000_000
"""How often a program looks at a flag, about."""
_on_triton = lazy_module("rlk_kernels.parallel.peer.kernels")
_numbers = itertools.count()
_living: "WeakValueDictionary[int, PeerGather]" = WeakValueDictionary()
"""By number: what a custom operator can be given."""


class PeerGather:
    """See the file; `peer_gather` makes it."""

    def __init__(
        self, addresses: Sequence[int], rank: int, device: torch.device, capacity: int,
        seconds: float = SECONDS,
    ) -> None:  # fmt: skip
        """addresses: of each rank's region of `region_bytes` zeroed bytes, as this process sees
        it; capacity: bytes of a rank's shard at most."""
        integers = {"dtype": torch.int32, "device": device}
        missing = torch.zeros(len(addresses), dtype=torch.int32, pin_memory=device.type == "cuda")
        self.channels = Channels(
            rank=rank,
            ranks=len(addresses),
            slot=slot_bytes(capacity),
            polls=max(1, int(seconds * POLLS_PER_SECOND)),
            regions=torch.tensor(addresses, dtype=torch.int64, device=device),
            counters=torch.zeros(CHANNELS, **integers),
            failed=torch.zeros(1, **integers),
            missing=missing,
        )
        self.device, self.capacity, self.seconds = device, capacity, seconds
        self._missing = (ctypes.c_int * len(addresses)).from_address(missing.data_ptr())
        self.number = next(_numbers)
        _living[self.number] = self

    def takes(self, x: Tensor) -> bool:
        """Whether x[..., F] is one that is gathered here."""
        size = x.numel() * x.element_size()
        return 0 < size <= self.capacity and x.element_size() in (2, 4, 8)

    def columns(self, x: Tensor) -> Tensor:
        """[..., R F] of x[..., F], as `copies.gather_columns`; called on all ranks, with one shape.

        Raises UnsupportedShape for what `takes` does not, and RankMissing where a rank did not come
        to an earlier call that has ended.
        """
        return call(_peer_columns, x, self.number, self.channels.ranks)

    def check(self) -> None:
        """Raise RankMissing where a rank did not come to a call that has ended, also to one of a
        CUDA graph. Waits for nothing."""
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
                f"{tuple(x.shape)} {x.dtype} on {x.device} is not gathered by stores: "
                f"1 to {self.capacity} bytes on {self.device} are"
            )
        return _on_triton().columns(x, self.channels)


@torch.library.custom_op("rlk::peer_columns", mutates_args=())
def _peer_columns(x: Tensor, number: int, ranks: int) -> Tensor:
    return _living[number].launch(x)


@_peer_columns.register_fake
def _(x, number, ranks):
    return x.new_empty(*x.shape[:-1], ranks * x.shape[-1])


refuse_gradient(_peer_columns, "peer_gather", "it is for inference, and has no gradient")
dispatch_straight()


def peer_gather(
    group: dist.ProcessGroup, device: torch.device, capacity: int, seconds: float = SECONDS
) -> PeerGather:
    """Of the ranks of `group`, which talks between hosts (gloo), each with its GPU; for shards of
    up to `capacity` bytes. Called on all of them; keep it for as long as any graph that has it.

    Raises UnsupportedDevice, on all ranks alike, where one cannot store to another.
    """
    places = memory.exchanged(group, memory.place(device))
    why = memory.exchanged(group, memory.unreachable(device, places))
    if len(places) > MOST_RANKS:
        why.append(f"{len(places)} ranks are more than {MOST_RANKS}")
    if any(why):
        raise UnsupportedDevice(f"no gathering by stores: {next(filter(None, why))}")
    rank = group.rank()
    with torch.cuda.device(device):
        # Never freed: a graph may still store to it.
        own = memory.allocate(region_bytes(group.size(), capacity))
        handles = memory.exchanged(group, memory.handle_of(own))
        addresses = [
            own if r == rank else memory.opened(handle) for r, handle in enumerate(handles)
        ]
        gather = PeerGather(addresses, rank, device, capacity, seconds)
        torch.cuda.synchronize()
    memory.exchanged(group, None)  # all regions are zero and opened
    return gather
