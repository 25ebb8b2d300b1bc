"""The processes of a run: one, or those of torchrun. Each samples with a vLLM of its own, and they
share the trainer's weights by FSDP2."""

import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


class Ranks:
    """This process's `rank` among `size`."""

    def __init__(self, device: torch.device) -> None:
        self.size, self.rank = (int(os.environ.get(x, y)) for x, y in SINGLE.items())
        if self.size > 1:
            if device.type == "cuda":
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        self.device = device

    def share(self, model: torch.nn.Module) -> None:
        """Shards a causal LM layer by layer, in place; gradients are summed up in fp32."""
        if self.size > 1:
            policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
            for part in (*model.model.layers, model):
                fully_shard(part, mp_policy=policy)

    def total(self, number: float) -> float:
        return self._reduced(number, dist.ReduceOp.SUM)

    def most(self, number: float) -> float:
        return self._reduced(number, dist.ReduceOp.MAX)

    def _reduced(self, number: float, how: dist.ReduceOp.RedOpType) -> float:
        if self.size == 1:
            return number
        value = torch.tensor(number, dtype=torch.float64, device=self.device)
        dist.all_reduce(value, how)
        return value.item()


SINGLE = {"WORLD_SIZE": 1, "RANK": 0}


def local(value: Tensor) -> Tensor:
    """What this rank holds of it."""
    return value.to_local() if isinstance(value, DTensor) else value


def whole(value: Tensor) -> Tensor:
    """On every rank; all of them ask at once."""
    return value.full_tensor() if isinstance(value, DTensor) else value
