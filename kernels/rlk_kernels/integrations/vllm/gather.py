"""The gather of columns over vLLM's tensor-parallel ranks: by stores into the memory of other GPUs,
where those reach each other, and else by vLLM's own all-gather. Both are copies.

With vLLM's `disable_custom_all_reduce`, its switch for access to other GPUs' memory, everything
goes through its all-gather. The choice follows the number of rows when the operator runs, outside
of compiled code.

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
"""The PeerGather of each group of vLLM, by the group's name; None where the group has none."""
_compiled: set[tuple[tuple[int, ...], torch.dtype]] = set()
_logger = init_logger(f"vllm.{__name__}")


def connect(columns: tuple[int, ...], dtype: torch.dtype) -> None:
    """Share memory with the other ranks, once, and compile what gathers these numbers of columns
    of a rank: before any CUDA graph is captured. Called on all ranks."""
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
    # Two batches that overlap are on two streams.
    if parallel.disable_custom_all_reduce or parallel.enable_dbo:
        return None
    if not HAS_TRITON or ranks.device.type != "cuda":
        return None
    try:
        return peer_gather(ranks.cpu_group, ranks.device)
    except UnsupportedDevice as error:
        _logger.warning("%s; the kernels gather by vLLM's all-gather", error)
        return None


def check() -> None:
    """Raise RankMissing where a rank did not come to an earlier gather."""
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
