"""Gathers columns over vLLM's tensor-parallel ranks: by stores into the memory of other GPUs if the
GPUs can access each other, and otherwise by vLLM's own all-gather. Both copy values.

With vLLM's `disable_custom_all_reduce`, which disables access to other GPUs' memory, all gathers
use vLLM's all-gather. The choice is made when the operator runs, outside of compiled code, because
it depends on the number of rows.

T = rows   F = columns of a rank   R = ranks
"""

from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tp_group
from vllm.logger import init_logger

from rlk_kernels.custom_op import call, custom_op
from rlk_kernels.device import HAS_TRITON
from rlk_kernels.errors import UnsupportedDevice
from rlk_kernels.parallel.peer.gather import PeerGather, peer_gather

_peers: dict[str, PeerGather | None] = {}
"""Name of a group of vLLM -> its PeerGather, or None if it has none."""
_compiled: set[tuple[tuple[int, ...], torch.dtype]] = set()
_logger = init_logger(f"vllm.{__name__}")


def connect(columns: tuple[int, ...], dtype: torch.dtype) -> None:
    """Shares memory with the other ranks, once, and compiles the gathers of these numbers of
    columns of a rank. Call it on all ranks before a CUDA graph is captured."""
    ranks = get_tp_group()
    if ranks.unique_name not in _peers:
        _peers[ranks.unique_name] = _shared(ranks)
    peers = _peers[ranks.unique_name]
    if peers is None or (columns, dtype) in _compiled:
        return
    for f in columns:
        peers.compile_for(f, dtype)
    torch.cuda.synchronize()
    peers.check()
    _compiled.add((columns, dtype))


def _shared(ranks: Any) -> PeerGather | None:
    parallel = get_current_vllm_config().parallel_config
    # Two overlapping batches (DBO) run on two streams.
    if parallel.disable_custom_all_reduce or parallel.enable_dbo:
        return None
    if not HAS_TRITON or ranks.device.type != "cuda":
        return None
    try:
        return peer_gather(ranks.cpu_group, ranks.device)
    except UnsupportedDevice as error:
        _logger.warning("%s; the kernels use vLLM's all-gather", error)
        return None


def check() -> None:
    """Raises RankMissing if a rank did not join an earlier gather."""
    peers = _peers.get(get_tp_group().unique_name)
    if peers is not None:
        peers.check()


def columns(x: Tensor, ranks: int) -> Tensor:
    """[T, R F] of this rank's x[T, F]."""
    return call(_columns, x, ranks)


@custom_op("vllm_columns", lambda x, ranks: x.new_empty(*x.shape[:-1], ranks * x.shape[-1]))
def _columns(x: Tensor, ranks: int) -> Tensor:
    group = get_tp_group()
    peers = _peers.get(group.unique_name)
    if peers is not None and peers.takes(x):
        return peers.launch(x)
    return group.all_gather(x.contiguous(), dim=-1)
