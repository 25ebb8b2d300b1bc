"""The processes of a run: one, or those of torchrun. Each process samples with a vLLM of its own,
and they shard the trainer's weights with FSDP2."""

import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


class Ranks:
    """This process's rank, and the number of ranks."""

    def __init__(self, device: torch.device) -> None:
        self.size, self.rank = (int(os.environ.get(x, y)) for x, y in SINGLE.items())
        if self.size > 1:
            if device.type == "cuda":
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        self.device = device

    def shard(self, model: torch.nn.Module) -> None:
        """Shards a causal LM layer by layer, in place; gradients are added up in fp32."""
        if self.size > 1:
            policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
            for part in (*model.model.layers, model):
                fully_shard(part, mp_policy=policy)

    def total(self, number: float) -> float:
        return self._reduced(number, dist.ReduceOp.SUM)

    def largest(self, number: float) -> float:
        return self._reduced(number, dist.ReduceOp.MAX)

    def _reduced(self, number: float, how: dist.ReduceOp.RedOpType) -> float:
        if self.size == 1:
            return number
        value = torch.tensor(number, dtype=torch.float64, device=self.device)
        dist.all_reduce(value, how)
        return value.item()


SINGLE = {"WORLD_SIZE": 1, "RANK": 0}


def local(value: Tensor) -> Tensor:
    """This rank's shard of a tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def whole(value: Tensor) -> Tensor:
    """The whole of a sharded tensor. Call this on all ranks."""
    return value.full_tensor() if isinstance(value, DTensor) else value
