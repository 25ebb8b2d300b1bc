"""The ranks of one Megatron model: its tensor, context, data, expert and pipeline parallelism.

As megatron-core numbers them, the ranks of tensor parallelism are neighbours, those of context
parallelism follow each other in steps of tp, those of data parallelism in steps of tp * cp, and the
stages of the pipeline come last. Neighbours share experts.
"""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from rlk_align.engines.process.ranks import Ranks

Shards = list[tuple[int, int, int]]
"""(rank, first feature, feature after the last)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The rank of one process in each group."""

    all: Ranks
    tp: Ranks
    """The ranks that share weights and have the same rows."""
    cp: Ranks
    """The ranks that share sequences and have the same shards of weights."""
    dp: Ranks
    """The ranks that have other samples."""
    ep: Ranks
    """The ranks that share experts."""
    pp: Ranks
    """The stages of the pipeline that compute the same rows."""

    @classmethod
    def of(cls, ranks: Ranks) -> "Grid":
        """The grid of megatron-core's parallel state, which must be initialised."""
        from megatron.core import parallel_state as state

        def among(kind: str) -> Ranks:
            group, rank, world = (
                getattr(state, f"get_{kind}_parallel_{what}")()
                for what in ("group", "rank", "world_size")
            )
            return Ranks(rank, world, ranks.device, group)

        return cls(
            all=ranks,
            tp=among("tensor_model"),
            cp=among("context"),
            dp=among("data"),
            ep=among("expert_model"),
            pp=among("pipeline_model"),
        )

    @property
    def neighbours(self) -> list[int]:
        """The ranks that have the same rows as this one, including this one."""
        first = self.all.rank - self.tp.rank
        return list(range(first, first + self.tp.world))

    @property
    def reports(self) -> bool:
        """Whether this rank reports the log-probs of its samples."""
        return self.tp.rank == 0 and self.cp.rank == 0 and self.pp.rank == self.pp.world - 1

    def stage(self, number: int) -> list[int]:
        """The ranks of one stage; the numbers of virtual stages go round the pipeline's ranks."""
        size, place = self.all.world // self.pp.world, number % self.pp.world
        return list(range(place * size, (place + 1) * size))

    def shards(self, shards: Shards, stage: int) -> Shards:
        """The shards of all ranks of a stage, from those of its tensor-parallel ranks."""
        firsts = self.stage(stage)[:: self.tp.world]
        return [(first + rank, a, b) for first in firsts for rank, a, b in shards]

    def of_all_stages(self, of_stage: Any) -> list[Any]:
        """The objects of all stages, in their order; called on every rank."""
        every: list[Any] = [None] * self.pp.world
        if self.pp.world == 1:
            return [of_stage]
        dist.all_gather_object(every, of_stage, group=self.pp.group)
        return every
