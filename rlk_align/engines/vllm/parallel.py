"""vLLM's tensor-parallel ranks, and how what they hold is put together."""

import torch

from rlk_align.engines.common.parameters import Shard


class TensorParallel:
    """This worker process among vLLM's tensor-parallel ranks."""

    def __init__(self) -> None:
        from vllm.distributed import get_tp_group

        self._group = get_tp_group()
        self.rank: int = self._group.rank_in_group
        self.world: int = self._group.world_size

    def gather(self, part: torch.Tensor, dim: int, copies: int = 1) -> torch.Tensor:
        """Every rank's part, one after another along `dim`; of `copies` ranks that hold the same
        one, the first."""
        if self.world == 1:
            return part
        return torch.cat(self._all(part)[::copies], dim)

    def parts(self, local: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, equal in shape, in rank order."""
        return [local] if self.world == 1 else self._all(local)

    def replicas(self, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The copies of ranks 1, 2, ..."""
        return () if self.world == 1 else tuple(self._all(value)[1:])

    def shards(self, dim: int, size: int, total: int, copies: int = 1) -> tuple[Shard, ...]:
        """Equal shards of `size`, as far as `total` goes; none where one rank holds all."""
        if self.world == 1:
            return ()
        starts = [(rank, rank // copies * size) for rank in range(self.world)]
        return tuple(
            Shard(rank, dim, start, min(start + size, total))
            for rank, start in starts
            if start < total
        )

    def _all(self, part: torch.Tensor) -> list[torch.Tensor]:
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.world)]
        torch.distributed.all_gather(parts, part, group=self._group.device_group)
        return parts
