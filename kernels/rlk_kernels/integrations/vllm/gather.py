"""The gather of columns over vLLM's tensor-parallel ranks: few bytes by stores into the memory of
other GPUs, where those reach each other, and all else by vLLM's own all-gather. Both are copies.

How many rows a batch has is looked at when the operator runs: compiled code does not see it.
RLK_PEER_GATHER=0 in the environment leaves everything to vLLM.

T = rows   F = columns of a rank   R = ranks
"""

import os
import warnings
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tp_group

from rlk_kernels.backend import call, dispatch_straight
from rlk_kernels.device import HAS_TRITON
from rlk_kernels.errors import UnsupportedDevice
from rlk_kernels.parallel.peer.gather import PeerGather, peer_gather

SMALL = 1 << 20
"""Bytes of a rank's shard up to which it is stored to the others."""
_peers: dict[str, PeerGather | None] = {}
"""By name of vLLM's group; None where its GPUs do not reach each other."""


def connect() -> None:
    """Share memory with the other ranks, once; called on all of them."""
    ranks = get_tp_group()
    if ranks.unique_name in _peers:
        return
    _peers[ranks.unique_name] = None
    wanted = os.environ.get("RLK_PEER_GATHER", "1") != "0"
    if not wanted or not HAS_TRITON or ranks.device.type != "cuda":
        return
    try:
        _peers[ranks.unique_name] = peer_gather(ranks.cpu_group, ranks.device, SMALL)
    except UnsupportedDevice as error:
        warnings.warn(f"{error}; vLLM's all-gather is used", RuntimeWarning, stacklevel=2)


def _connected() -> PeerGather | None:
    return _peers.get(get_tp_group().unique_name)


def check() -> None:
    """Raise RankMissing where a rank did not come to an earlier gather."""
    peers = _connected()
    if peers is not None:
        peers.check()


def columns(x: Tensor) -> Tensor:
    """[T, R F] of this rank's x[T, F]."""
    return call(_columns, x, get_tp_group().world_size)


@torch.library.custom_op("rlk::vllm_columns", mutates_args=())
def _columns(x: Tensor, ranks: int) -> Tensor:
    peers: Any = _connected()
    if peers is not None and peers.takes(x):
        return peers.launch(x)
    return get_tp_group().all_gather(x.contiguous(), dim=-1)


@_columns.register_fake
def _(x, ranks):
    return x.new_empty(*x.shape[:-1], ranks * x.shape[-1])


dispatch_straight()
