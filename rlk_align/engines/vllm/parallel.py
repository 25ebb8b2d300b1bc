"""vLLM's tensor-parallel ranks, and how their tensors are gathered."""

import torch


class TensorParallel:
    """The rank of this worker process among vLLM's tensor-parallel ranks."""

    def __init__(self) -> None:
        from vllm.distributed import get_tp_group

        self._group = get_tp_group()
        self.rank: int = self._group.rank_in_group
        self.world: int = self._group.world_size

    def parts(self, local: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, equal in shape, in rank order."""
        if self.world == 1:
            return [local]
        local = local.contiguous()
        parts = [torch.empty_like(local) for _ in range(self.world)]
        torch.distributed.all_gather(parts, local, group=self._group.device_group)
        return parts
